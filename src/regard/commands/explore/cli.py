"""`regard explore`."""

import argparse
import sys

from regard.errors import UserError
from regard.runs import arguments

HELP = "Replace heads on a page of this machine, and watch the prediction change."
EXAMPLES = """examples:
  regard explore minilm
  regard explore gpt2 --open
  regard explore runs/db --method "sapt" --seed 42
  regard explore minilm --constants runs/reviews/constants.safetensors

MODEL may also be a folder with a run of learn, or one that rollback wrote.
Ctrl-C ends it. It needs pip install 'regard[explore]'.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    arguments.add_model_options(parser, default="minilm")
    parser.add_argument("--method", metavar="NAME", help="method, if MODEL is a run with several")
    parser.add_argument("--seed", metavar="N", help="seed, if MODEL is a run with several")
    parser.add_argument(
        "--constants",
        type=arguments.parse_path,
        metavar="FILE",
        help="averages to use for heads: constants.safetensors of `regard replace --special-token-layout natural`",
    )
    parser.add_argument("--length", default="256", metavar="N", help="tokens of a text that are read (default: 256)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, which others do not reach)"
    )
    parser.add_argument("--port", default="0", metavar="N", help="port to listen on (default: a free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> None:
    """Load the model, say where the page is, and serve it until it is interrupted."""
    length = arguments.parse_number(args.length, int, "--length")
    port = arguments.parse_number(args.port, int, "--port")
    seed = arguments.parse_optional(args.seed, int, "--seed")
    if length < 2 or not 0 <= port <= 65_535:
        raise UserError(f"expected --length from 2 and --port from 0 to 65535, got {length} and {port}")
    if args.constants is not None and not args.constants.is_file():
        raise UserError(f"--constants: expected a file, {args.constants} is none")
    try:
        from regard.commands.explore import server
    except ImportError as error:
        raise UserError("explore needs starlette and uvicorn: pip install 'regard[explore]'") from error
    from regard.commands.explore.session import Session
    from regard.commands.explore.stages import open_stages

    with server.listen(args.host, port) as socket:
        stages = open_stages(args.model, args.method, seed, arguments.model_options(args))
        session = Session(stages, args.constants, length)
        token = server.make_token()
        address = server.address_of(socket, token)
        if not server.is_loopback(args.host):
            print(f"warning: others can reach {args.host}; who knows the address can use the model", file=sys.stderr)
        print(f"Explore {args.model} at {address} (Ctrl-C ends it)", flush=True)
        if args.open:
            import webbrowser

            webbrowser.open(address)
        server.serve(server.make_app(session, token, args.host), socket)
