"""How do files get to the Hub and back, and what is said when they do not?"""

import logging
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    HfFileSystem,
    auth_check,
    create_branch,
    create_repo,
    model_info,
    snapshot_download,
    upload_folder,
    whoami,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .errors import UserError

if TYPE_CHECKING:
    import datasets

# A refused connection is no HfHubHTTPError; it shares that error's base in the HTTP library that huggingface_hub uses.
_HUB_FAILURES = (OSError, *HfHubHTTPError.__bases__)
# What huggingface_hub makes of a large file's failed upload; the reason is its cause.
_PUSH_FAILURES = (*_HUB_FAILURES, RuntimeError)
# The Hub counts requests in windows of 300 s, and the other ranks of a run wait 600 s at most (NCCL's default).
_PATIENCE_SECONDS = 330
_PAUSES = (2, 10)  # seconds, where the Hub does not say how long

_log = logging.getLogger(__name__)


def is_hub_id(name: object) -> bool:
    """Whether `name` reads user/repo and is no path of this machine, so that a public card may name it."""
    if not isinstance(name, str) or name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def download(repo_id: str, files: list[str], *, revision: str | None, **options: Any) -> Path:
    """Fetch files of one commit into the cache.

    Args:
        repo_id: "user/repo", a model repository.
        files: their names.
        revision: branch, tag or commit; None is the main branch.
        options: `token`, `cache_dir`, `force_download`, `local_files_only` of `huggingface_hub.snapshot_download`.

    Returns: the folder that holds them.

    Raises:
        UserError: no such repository or revision, no right to read it, or no connection and nothing in the cache.
    """
    if not is_hub_id(repo_id):
        raise UserError(
            f"There is no folder {repo_id}, and a Hub id would read user/repo. "
            "Give the folder that save_pretrained wrote, or a Hub id."
        )
    try:
        return Path(_patiently(snapshot_download, repo_id, revision=revision, allow_patterns=files, **options))
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo_id} is no folder here and no Hub repository that you may read. Check the spelling; "
            "for a private or gated one log in with `hf auth login`, set HF_TOKEN, or pass token=..."
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{repo_id} has no revision {revision!r}. Pass a branch, a tag or a commit of it.") from error
    except (EntryNotFoundError, *_HUB_FAILURES) as error:
        raise UserError(
            f"{repo_id} is no folder here and could not be loaded from the Hub: {error}\n"
            "Check the connection, or give a folder."
        ) from error


def read_dataset_column(repo_id: str, column: str) -> "datasets.Dataset":
    """One column of a dataset on the Hub. Of its Parquet files only this column's bytes are fetched.

    Args:
        repo_id: "user/repo", a dataset repository.
        column: name.

    Returns: a dataset with that column alone.

    Raises:
        UserError: no such dataset, no Parquet files, another set of columns, or no connection.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet

    try:
        hub = HfFileSystem()
        hub.info(f"datasets/{repo_id}")
        tables = []
        for path in sorted(hub.glob(f"datasets/{repo_id}/**/*.parquet")):
            with hub.open(path, "rb") as stream:
                file = pyarrow.parquet.ParquetFile(stream)
                if column not in file.schema_arrow.names:
                    raise UserError(
                        f"{path} has no column {column!r}, but {', '.join(file.schema_arrow.names)}. Of pictures or "
                        f"clips make latents first: python recipes/prepare_dataset.py --dataset_name {repo_id}"
                    )
                tables.append(file.read([column]))
    except (FileNotFoundError, RepositoryNotFoundError) as error:
        raise UserError(
            f"{repo_id} is nothing here and no dataset on the Hub that you may read. Check the spelling; for a "
            "private one log in with `hf auth login`."
        ) from error
    except _HUB_FAILURES as error:
        raise UserError(f"The dataset {repo_id} could not be read from the Hub: {_one_line(error)}.") from error
    if not tables:
        raise UserError(
            f"{repo_id} has no Parquet files. Download it and scan the folder: hf download {repo_id} --repo-type "
            "dataset --local-dir FOLDER"
        )
    return datasets.Dataset(pyarrow.concat_tables(tables))


def full_id(repo_id: str, *, token: str | bool | None = None) -> str:
    """ "user/repo" of what may be "repo" in one's own namespace.

    Raises:
        UserError: no Hub id, not logged in, or the Hub fails.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id!r} is no Hub id: {error} Give it as user/repo.") from error
    if "/" in repo_id:
        return repo_id
    try:
        return f"{_patiently(whoami, token=token)['name']}/{repo_id}"
    except _HUB_FAILURES as error:
        raise UserError(_reason(error, repo_id)) from error


def make_repository(repo_id: str, *, token: str | bool | None = None) -> str:
    """Make a model repository unless it exists, and ask for the right to write: before work whose result it is for.

    Returns: its "user/repo".

    Raises:
        UserError: no Hub id, not logged in, no right to write there, or the Hub fails.
    """
    try:
        repo_id = _make_repository(full_id(repo_id, token=token), token, None)
        # Of one that exists, making it says nothing: huggingface_hub is content if it may be read.
        _patiently(auth_check, repo_id, token=token, write=True)
        return repo_id
    except _HUB_FAILURES as error:
        raise UserError(_reason(error, repo_id)) from error


def push_folder(
    folder: str | Path,
    files: list[str],
    repo_id: str,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    saved_in: str | Path | None = None,
    commit_message: str = "Upload files",
) -> str:
    """Upload files of a folder, and nothing else in it, to a model repository, which is made if missing.

    Files that are there already are not uploaded again. Where the Hub asks to wait (429), stumbles (5xx) or drops the
    connection, it is asked again, with pauses of 330 seconds in all at most.

    Args:
        folder: where they lie, saved already: a failure loses nothing.
        files: their names, or patterns such as "transformer/*".
        repo_id: "user/repo", or "repo" for one's own namespace.
        token: one that may write; None takes that of `hf auth login`.
        private: whether a new repository is private; None leaves it to the Hub's defaults.
        revision: branch, made if missing; None is the main one.
        saved_in: the folder that messages name, where `folder` does not stay.
        commit_message: title of the commit.

    Returns: URL of the commit.

    Raises:
        UserError: not logged in, no right to write, another visibility than asked for, a card that the Hub refuses, or
            the Hub fails. The message has the command that uploads the folder later.
    """
    saved_in = saved_in or folder
    later = _upload_command(saved_in, files, repo_id, private, revision)
    try:
        repo_id = _make_repository(repo_id, token, private)
        if revision is not None:
            _patiently(create_branch, repo_id, branch=revision, token=token, exist_ok=True)
        options = {"token": token, "revision": revision, "commit_message": commit_message}
        commit = _patiently(upload_folder, repo_id=repo_id, folder_path=folder, allow_patterns=files, **options)
    except UserError as error:
        raise UserError(f"{error} It is saved in {saved_in}.") from error
    except _PUSH_FAILURES as error:
        raise UserError(f"{_reason(error, repo_id)} It is saved in {saved_in}. To upload it later: {later}") from error
    except ValueError as error:  # what huggingface_hub raises where the Hub's check of a card fails
        refusal = f"{repo_id} was not pushed: {_one_line(error)}. It is saved in {saved_in}. Fix that, then: {later}"
        raise UserError(refusal) from error
    return commit.commit_url


def _make_repository(repo_id: str, token: str | bool | None, private: bool | None) -> str:
    """The full id of a model repository, which is made unless it exists."""
    repo_id = _patiently(create_repo, repo_id, token=token, private=private, exist_ok=True).repo_id
    is_private = None if private is None else _patiently(model_info, repo_id, token=token).private
    if is_private != private:
        words = {True: "private", False: "public"}
        raise UserError(
            f"{repo_id} exists and is {words[is_private]}, but private={private} (--{words[private]}) was "
            f"asked for. Make it {words[private]} in its settings on the Hub, or push without --{words[private]}."
        )
    return repo_id


def _patiently(call: Callable, *arguments: Any, **options: Any) -> Any:
    """What `call` returns; it is called again where the Hub asks to wait, stumbles or drops the connection."""
    pauses, waited = iter(_PAUSES), 0
    while True:
        try:
            return call(*arguments, **options)
        except _PUSH_FAILURES as error:
            pause = _asked_pause(error) or next(pauses, None)
            waited += pause or 0
            if pause is None or waited > _PATIENCE_SECONDS or not _may_pass(error):
                raise
            _log.warning("The Hub does not answer as it should (%s): again in %g s.", _short(error), pause)
        time.sleep(pause)


def _may_pass(error: Exception) -> bool:
    """Whether the same call may work later: too many requests, a fault of the server, a lost connection."""
    status = _status(error)
    if isinstance(error, LocalEntryNotFoundError) and status is None:
        return False  # no network, or none wanted, and nothing in the cache
    if isinstance(error, OfflineModeIsEnabled | LocalTokenNotFoundError):
        return False
    local = getattr(error, "filename", None) is not None  # a file of this machine that cannot be read
    return status == 429 or status >= 500 if status else not local


def _status(error: BaseException) -> int | None:
    response = getattr(_cause(error), "response", None)
    return None if response is None else response.status_code


def _cause(error: BaseException) -> BaseException:
    wraps = isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None
    return error.__cause__ if wraps else error


def _asked_pause(error: BaseException) -> int | None:
    """Seconds that the Hub asks to wait, with one more against rounding, or None."""
    if not _status(error):
        return None
    headers = _cause(error).response.headers
    asked = re.search(r"^(\d+)$", headers.get("Retry-After", "")) or re.search(
        r"\bt=(\d+)", headers.get("RateLimit", "")
    )
    return int(asked[1]) + 1 if asked else None


def _short(error: BaseException) -> str:
    return f"status {_status(error)}" if _status(error) else _one_line(_cause(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).removesuffix(".")


def _reason(error: Exception, repo_id: str) -> str:
    if isinstance(error, OfflineModeIsEnabled):
        return f"Nothing is pushed to {repo_id} while HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set. Unset it."
    if isinstance(error, LocalTokenNotFoundError):
        return f"Nobody is logged in here, and {repo_id} names no user. Log in with `hf auth login`, or pass a token."
    status = _status(error)
    if status in (401, 403):
        return (
            f"The Hub refuses to write to {repo_id} (status {status}). Log in with `hf auth login`, or pass a token "
            "that may write there."
        )
    if status == 429:
        asked = _asked_pause(error)
        return f"The Hub takes no more requests now (status 429{f', it asks to wait {asked - 1} s' if asked else ''})."
    return f"Pushing to {repo_id} failed: {_one_line(_cause(error))}."


def _upload_command(
    folder: str | Path, files: list[str], repo_id: str, private: bool | None, revision: str | None
) -> str:
    words = ["hf", "upload", repo_id, str(folder), "."]
    words += [word for name in files for word in ("--include", name)]
    words += (["--private"] if private else []) + (["--revision", revision] if revision else [])
    return shlex.join(words)
