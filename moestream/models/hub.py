"""The hub: what a repository holds, and the bytes of a file. The one module that uses the network.

huggingface_hub does both, so that its settings apply: ``HF_TOKEN`` and the token of ``hf auth login``, ``HF_ENDPOINT`` for a mirror,
``HF_HUB_OFFLINE``, proxies. Its ``hf_hub_download`` begins anew after an interruption, and so does its xet protocol; for tens of
gigabytes that is no way. So its ``http_get`` is used, which plain HTTP servers and mirrors serve as well, into a file that stays.

A file is asked for at its address on the hub each time, never at where that redirects to: such a link ends after an hour, a
download may not. The client sends no token to another host than the hub.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from moestream.errors import MoestreamError
from moestream.models.names import printable

_INFO_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository; ``digest`` as ``store.ModelFile.digest``, empty where the hub tells none."""

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit."""

    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """The hub that the environment names.

    Raises:
        MoestreamError: ``HF_ENDPOINT`` is no address.
    """

    def __init__(self) -> None:
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars

        with warnings.catch_warnings(action="ignore"):  # HF_HUB_DISABLE_PROGRESS_BARS=0; we show our own
            disable_progress_bars()
        self.endpoint: str = constants.ENDPOINT
        try:
            parts = urlsplit(self.endpoint)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise MoestreamError(
                f"HF_ENDPOINT={self.endpoint}: not the address of a hub", hint="unset it, or write it as https://HOST"
            )
        self._api = huggingface_hub.HfApi(endpoint=self.endpoint)

    def listing(self, repo_id: str) -> Listing:
        """The files of a repository.

        Raises:
            MoestreamError: there is no such repository, it may not be seen, or the hub does not answer.
        """
        with self._errors(repo_id):
            info = self._api.model_info(repo_id, files_metadata=True, timeout=_INFO_TIMEOUT_S)
            commit = info.sha
            if info.siblings is None or not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
                raise ValueError("it names no commit")
            files = []
            for file in info.siblings:
                digest = ""
                if file.lfs is not None:
                    digest = f"sha256:{file.lfs.sha256}"
                elif file.blob_id:
                    digest = f"git-sha1:{file.blob_id}"
                size = file.size if type(file.size) is int and file.size >= 0 else -1
                good = size >= 0 and re.fullmatch(r"sha256:[0-9a-f]{64}|git-sha1:[0-9a-f]{40}", digest)
                files.append(RemoteFile(str(file.rfilename), size, digest if good else ""))
            return Listing(commit, tuple(files))

    def read(self, repo_id: str, commit: str, path: str, sink: BinaryIO, *, offset: int, end: int, piece: bool = False) -> None:
        """Write the bytes ``offset`` to ``end`` of a file to a sink, a lost connection being taken up again.

        Args:
            offset: how many bytes the sink has already. It is asked to ``seek`` to 0 and ``truncate`` when the server sends the
                file from its beginning all the same.
            end: of the file, or with ``piece`` of what is wanted of it.

        Raises:
            MoestreamError: as ``listing``; the file is not there any more; the server sends another number of bytes.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(repo_id, path, revision=commit, endpoint=self.endpoint)
        with self._errors(repo_id, path):
            headers: dict[str, Any] = {**build_hf_headers(library_name="moestream"), "Accept-Encoding": "identity"}
            if piece:
                headers["Range"] = f"bytes={offset}-{end - 1}"
                http_get(url, sink, headers=headers, expected_size=end - offset, displayed_filename=path)
            else:
                http_get(url, sink, resume_size=offset, headers=headers, expected_size=end, displayed_filename=path)

    @contextlib.contextmanager
    def _errors(self, repo_id: str, path: str = "") -> Iterator[None]:
        """Turn what huggingface_hub raises into our error."""
        from huggingface_hub import errors

        what = f"{repo_id}/{printable(path)}" if path else repo_id
        again = "run the same command again: it goes on where it stopped"
        try:
            yield
        except MoestreamError:
            raise
        except errors.GatedRepoError as error:
            raise MoestreamError(
                f"{repo_id} is gated: who downloads it must have been given access",
                hint=f"ask for access at {self.endpoint}/{repo_id}, then set HF_TOKEN or run: hf auth login",
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise MoestreamError(
                f"there is no repository {repo_id} at {self.endpoint}, or it is private",
                hint="check the name; for a private one set HF_TOKEN or run: hf auth login",
            ) from error
        except (errors.RemoteEntryNotFoundError, errors.RevisionNotFoundError) as error:
            raise MoestreamError(
                f"{what} is listed at {self.endpoint}, and is not there",
                hint="try again later; a mirror may lag behind the hub",
            ) from error
        except errors.HfHubHTTPError as error:
            code = error.response.status_code
            said = printable(" ".join((error.server_message or "").split()))
            refused = code in (401, 403)
            raise MoestreamError(
                f"{self.endpoint} refuses {what}: HTTP {code}" + (f", {said}" if said else ""),
                hint="check HF_TOKEN, or run: hf auth login" if refused else "try again later",
            ) from error
        except errors.OfflineModeIsEnabled as error:
            raise MoestreamError("HF_HUB_OFFLINE is set: nothing can be downloaded", hint="unset it") from error
        except UnicodeEncodeError as error:
            raise _bad_token() from error
        except errors.HTTPError as error:  # the client's own: no connection, a connection lost, too many redirects
            if "Illegal header value" in str(error):  # and the value, which nobody is to see
                raise _bad_token() from None
            said = printable(" ".join(str(error).split())) or type(error).__name__
            raise MoestreamError(
                f"cannot download {what} from {self.endpoint}: {said}",
                hint=f"check the connection and the proxy, or name a mirror with HF_ENDPOINT; then {again}",
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MoestreamError(
                f"{self.endpoint} does not answer for {what} as a hub does: {printable(str(error))}",
                hint="check HF_ENDPOINT; a proxy or a login page may be in the way",
            ) from error
        except OSError as error:
            if not str(error).startswith("Consistency check failed"):
                raise
            raise MoestreamError(
                f"{self.endpoint} ended {what} before its end, or sent more than it",
                hint=again,
            ) from error


def _bad_token() -> MoestreamError:
    return MoestreamError(
        "the token for the hub has characters that no request can carry", hint="check HF_TOKEN, or run: hf auth login"
    )
