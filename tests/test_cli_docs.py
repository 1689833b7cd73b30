"""Does docs/cli.md say what the commands say?"""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_page_of_the_command_line_is_up_to_date():
    written = runpy.run_path(str(ROOT / ".ci" / "write_cli_docs.py"))["text"]()
    assert (ROOT / "docs" / "cli.md").read_text() == written, "run: python .ci/write_cli_docs.py"
