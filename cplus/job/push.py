"""A finished job on the hub: the model, its card and the receipt, in a repository that is private by default."""

from __future__ import annotations

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from cplus.job.folder import Folder
from cplus.job.progress import say
from cplus.job.settings import AdaptConfig

BESIDE = ("README.md", "receipt.html", "receipt.json", "record.json")
"""What goes to the hub beside the model's own files."""
_FAILURES: tuple[type[BaseException], ...] = (OSError, *HfHubHTTPError.__bases__)  # the HTTP library's own errors too


def check_push(config: AdaptConfig) -> None:
    """Refuse a job that could not be uploaded at its end: without a token, or with one that the hub does not take."""
    if config.push_to_hub is None:
        return
    if get_token() is None:
        raise ValueError(
            f"push_to_hub {config.push_to_hub} needs a token with write access, and none was found; run 'hf auth "
            "login' or set HF_TOKEN, or leave out push_to_hub"
        )
    try:
        HfApi().whoami()
    except _FAILURES as error:
        raise ValueError(
            f"push_to_hub {config.push_to_hub}: the hub cannot be reached or does not take the token "
            f"({type(error).__name__}); log in again with 'hf auth login', or leave out push_to_hub"
        ) from error


def push(folder: Folder, config: AdaptConfig) -> str:
    """Upload the model, then its card and receipt, and return the address."""
    assert config.push_to_hub is not None
    name, api = config.push_to_hub, HfApi()
    say(f"uploading to {name}, {'public' if config.public else 'private'}")
    try:
        where = api.create_repo(name, private=not config.public, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder.model, commit_message="Upload the model")
        api.upload_folder(
            repo_id=name, folder_path=folder.root, allow_patterns=list(BESIDE), commit_message="Upload card and receipt"
        )
    except _FAILURES as error:
        raise ValueError(
            f"{folder.root}: the job is finished, but the upload to {name} failed ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason given'}); repeat it with: hf upload {name} "
            f"{folder.model}"
        ) from error
    return str(where)
