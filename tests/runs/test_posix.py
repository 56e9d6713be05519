import subprocess
import sys

import pytest


@pytest.mark.every_value
@pytest.mark.parametrize("missing", ["fcntl", "resource"])
def test_a_system_without_locks_is_refused_in_one_line(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None;"
        "from regard.cli import main; sys.exit(main(['compare', 'first', 'second']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = f"regard compare: system: expected Linux, macOS or WSL, got {sys.platform}, which has no {missing}\n"
    assert (ran.stderr.splitlines(keepends=True)[-1], ran.stdout, ran.returncode) == (expected, "", 2)
