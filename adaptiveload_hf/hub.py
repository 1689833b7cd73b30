"""How do the files of a bucket config get to the Hub and back, and what is said when they do not?"""

from pathlib import Path

from huggingface_hub import create_repo, model_info, snapshot_download, upload_folder
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .errors import UserError

# A refused connection is no HfHubHTTPError; it shares that error's base in the HTTP library that huggingface_hub uses.
_HUB_FAILURES = (OSError, *HfHubHTTPError.__bases__)


def is_hub_id(name):
    """Whether `name` reads user/repo and is no path of this machine, so that a public card may name it."""
    if not isinstance(name, str) or name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def download(repo_id, files, *, revision, **options):
    """
    Fetch files of one commit into the cache.

    Args:
        repo_id: "user/repo", a model repository.
        files: their names, list[str].
        revision: branch, tag or commit; None is the main branch.
        options: `token`, `cache_dir`, `force_download`, `local_files_only` of `huggingface_hub.snapshot_download`.

    Returns: `pathlib.Path` of the folder that holds them.

    Raises:
        UserError: no such repository or revision, no right to read it, or no connection and nothing in the cache.
    """
    if not is_hub_id(repo_id):
        raise UserError(
            f"There is no folder {repo_id}, and a Hub id would read user/repo. "
            "Give the folder that save_pretrained wrote, or a Hub id."
        )
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=files, **options))
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo_id} is no folder here and no Hub repository that you may read. Check the spelling; "
            "for a private or gated one log in with `hf auth login` or pass token=..."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo_id} has no revision {revision!r}. Pass a branch, a tag or a commit of it.") from error
    except (EntryNotFoundError, *_HUB_FAILURES) as error:
        raise UserError(
            f"{repo_id} is no folder here and could not be loaded from the Hub: {error}\n"
            "Check the connection, or give a folder."
        ) from error


def make_repository(repo_id, *, token=None, private=None):
    """
    Make a model repository unless it exists.

    Args:
        repo_id: "user/repo", or "repo" for one's own namespace.
        token: one that may write; None takes that of `hf auth login`.
        private: whether a new repository is private; None leaves it to the Hub's defaults.

    Returns: its full id "user/repo".

    Raises:
        UserError: not logged in, no right to write, no id, or it exists with another visibility than asked for.
    """
    try:
        repo_id = create_repo(repo_id, token=token, private=private, exist_ok=True).repo_id
        is_private = None if private is None else model_info(repo_id, token=token).private
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no Hub id: {error} Give it as user/repo.") from error
    except _HUB_FAILURES as error:
        raise UserError(_push_failure(error, repo_id)) from error
    if is_private != private:
        words = {True: "private", False: "public"}
        raise UserError(
            f"{repo_id} exists and is {words[is_private]}, but private={private} was asked for. "
            f"Make it {words[private]} in its settings on the Hub, or push with private=None."
        )
    return repo_id


def upload(folder, files, repo_id, *, token=None, commit_message="Upload bucket config"):
    """
    Upload files of a folder, and nothing else in it, as one commit.

    Args:
        folder: where they lie.
        files: their names, list[str].
        repo_id: "user/repo", which exists.
        token: one that may write; None takes that of `hf auth login`.
        commit_message: title of the commit.

    Returns: URL of the commit, str.

    Raises:
        UserError: no right to write, or the Hub fails.
    """
    try:
        commit = upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=files, token=token, commit_message=commit_message
        )
    except _HUB_FAILURES as error:
        raise UserError(_push_failure(error, repo_id)) from error
    return commit.commit_url


def _push_failure(error, repo_id):
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if status in (401, 403):
        reason = f"The Hub refuses to write to {repo_id} (status {status})"
        remedy = "Log in with `hf auth login`, or pass a token that may write there"
    else:
        reason, remedy = f"Pushing to {repo_id} failed: {error}", "Try again later"
    return (
        f"{reason}. {remedy}. Keep the config meanwhile with save_pretrained(folder); "
        f"`hf upload {repo_id} folder` uploads that folder."
    )
