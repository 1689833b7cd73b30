"""`adaptiveload push`: how does a bucket config get to the Hub?"""

from typing import Annotated

import typer

from ..tables import print_json, say_next
from .arguments import AsJson, Config


def push(
    config: Config,
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="user/repo, made if it is missing.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository. Default: the Hub's.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, made if it is missing. Default: main.")] = None,
    as_json: AsJson = False,
):
    """Upload a bucket config with its card to a model repository on the Hub. Log in first: hf auth login.

    \b
    Example:
      adaptiveload push config user/wan-1.3b-h200 --private
    """
    from ..config import BucketConfig

    url = BucketConfig.from_pretrained(config).push_to_hub(repository, private=private, revision=revision)
    print_json({"url": url}) if as_json else print(url)
    say_next("adaptiveload", "plan", repository, "--dataset", "DATASET", "--world-size", "8")
