"""`adaptiveload push`: how does a bucket config get to the Hub?"""

from pathlib import Path
from typing import Annotated

import typer

from ..tables import print_json
from .arguments import AsJson, Config, say_next_plan


def push(
    config: Config,
    repository: Annotated[
        str, typer.Argument(metavar="REPOSITORY", help="user/repo, or repo of yours; created if missing.")
    ],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Visibility of a new repository. Default: the Hub's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, created if missing. Default: main.")] = None,
    as_json: AsJson = False,
):
    """Upload a bucket config with its card to the Hub.

    It goes to a model repository, created if missing. Log in first: hf auth login.

    \b
    Example:
      adaptiveload push config user/wan-1.3b-h200 --private
    """
    from ..config import BucketConfig
    from ..hub import full_id

    loaded, folder = BucketConfig.from_pretrained(config), config if Path(config).is_dir() else None
    url = loaded.push_to_hub(repository, saved_in=folder, private=private, revision=revision)
    print_json({"url": url}) if as_json else print(url)
    branch = ("--revision", revision) if revision is not None else ()
    say_next_plan(full_id(repository), loaded.environment, *branch)
