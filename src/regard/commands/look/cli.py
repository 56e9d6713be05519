"""`regard look`."""

import argparse
import os
from pathlib import Path

from regard.commands.look.config import LookConfig
from regard.errors import UserError
from regard.runs import arguments

HELP = "Look at one text, token by token: what draws attention, what heads do."
EXAMPLES = """examples:
  regard look minilm "The cat sat on the mat." --open
  regard look gpt2 "The cat sat." "The cats sat." --out cats.html
  regard look gpt2 --file chapter.txt --heads 3.5,4.0
  regard look gpt2 "The cat sat." --against distilgpt2
  regard look google/vit-base-patch16-224 --images cat.png
  regard look ./base "Is it spam?" --learnt models/sapt-3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    arguments.add_model_options(parser)
    parser.add_argument("text", nargs="*", metavar="TEXT", help="one text, or two side by side")
    parser.add_argument("--file", type=arguments.parse_path, metavar="FILE", help="a text file, instead of TEXT")
    parser.add_argument("--images", nargs="+", metavar="FILE", help="one image or two, instead of TEXT")
    parser.add_argument("--against", metavar="MODEL", help="a second model, shown beside the first on the same text")
    parser.add_argument(
        "--learnt",
        type=arguments.parse_path,
        metavar="DIR",
        help="adapters of sapt that `regard rollback` wrote; MODEL is their base",
    )
    parser.add_argument(
        "--out",
        type=arguments.parse_path,
        metavar="FILE",
        help="page to write (default: look-MODEL.html, or look-MODEL-against-MODEL.html)",
    )
    parser.add_argument("--overwrite", action="store_true", help="write over FILE")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    arguments.add_config_options(parser, LookConfig)


def run(args: argparse.Namespace) -> None:
    """Look, write the page, say where it is. What can be refused is refused before the model is loaded."""
    config = LookConfig().replace(**arguments.parse_config_options(args, LookConfig))
    if sum(map(bool, (args.text, args.file, args.images))) != 1:
        raise UserError("expected one of TEXT, --file and --images")
    if args.learnt and (args.against or args.images or args.adapter):
        raise UserError("--learnt: expected neither --against, --images nor --adapter beside it")
    if args.learnt and arguments.changed_model_options(arguments.model_options(args)):
        raise UserError("--learnt: expected neither --dtype, --device nor --trust-remote-code beside it")
    if args.learnt and not args.learnt.is_dir():
        raise UserError(f"--learnt: expected a folder that `regard rollback` wrote, {args.learnt} is none")
    from regard.data.tables import read_pieces
    from regard.runs.output_dir import check_output_file

    texts = ["".join(read_pieces(args.file, "--file"))] if args.file else args.text
    names = [arguments.file_slug(name) for name in (args.model, args.against) if name]
    out = args.out or Path(f"look-{'-against-'.join(names)}.html")
    check_output_file(out, overwrite=args.overwrite)
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: expected a name that ends in .html, got {out}")
    from regard import models
    from regard.commands.look.run import list_sources, look

    sources = list_sources(None if args.images else texts, args.images, config, is_alone=args.against is not None)
    config.share(len(sources) + (args.against is not None))
    options, has_images = arguments.model_options(args), args.images is not None
    loaded = models.load(args.model, **options, images=has_images)
    second = models.load(args.against, **{**options, "adapter": None}, images=has_images) if args.against else None
    source = {"image": args.images} if has_images else {"text": texts}
    if args.learnt:
        from regard.continual.saved_adapters import load_adapters

        result = look(load_adapters(args.model, args.learnt), loaded.tokenizer, config=config, **source)
    else:
        result = look(loaded, against=second, config=config, **source)
    result.save(out, overwrite=args.overwrite)
    for text in filter(os.path.isfile, args.text or ()):  # for which pathlib raises an error if they are long
        print(f"note: {text} is read as a text; --file reads the file of this name")
    for pane in result.panes:
        for note in pane["notes"]:
            print(f"note: {note}")
    print(f"Written to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    if args.open:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())
