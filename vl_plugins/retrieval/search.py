"""Search among embeddings: the nearest images or captions of a query, exactly or with an index of FAISS."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vl_plugins.data.storage import error_text, write_file
from vl_plugins.functional.precision import full_precision
from vl_plugins.retrieval.features import Features
from vl_plugins.retrieval.similarities import Similarity, check_finite, count_and_first
from vl_plugins.utils.errors import UserError, check_name
from vl_plugins.utils.optional import require

__all__ = ["TARGETS", "ExactIndex", "FaissIndex", "Hits", "StaleIndexError", "build_index", "check_factory"]

TARGETS = ("images", "captions")

QUERIES_AT_A_TIME = 256
# Matrix products of one width, or of a multiple of this: they round according to their shape, the last columns of a
# crooked one too, and equal embeddings must have equal similarities.
VECTORS_AT_A_TIME = 16_384
COLUMNS = 256
SETS_AT_A_TIME = 1024  # for each of them a similarity computes a matrix

SIDECAR = "vl_plugins index of FAISS"


class Hits(NamedTuple):
    """What was found for Q queries, the nearest first.

    Args:
        similarities: (Q, top) float32 or float64; -inf where nothing more was found.
        indices: (Q, top) int64, of the items; -1 where nothing more was found. Items of equal similarity are in the
            order of their indices.
    """

    similarities: Tensor
    indices: Tensor


class StaleIndexError(UserError):
    """A file of :meth:`FaissIndex.write` belongs to other embeddings, or is damaged; it can be made again."""


class ExactIndex:
    """Compares a query with every item, some at a time.

    Args:
        embeddings: (N, D) floating point; unit vectors where the similarity is to be a cosine. With a ``similarity``
            whatever it takes, such as sets (N, K, D).
        similarity: called with the queries (q, ...) and some of the items (n, ...), returns their similarities (q, n),
            larger is closer. The dot product if left out.

    Raises:
        ValueError: a shape or type is not as above, an embedding holds NaN or infinity, or there is none.
    """

    def __init__(self, embeddings: Tensor, similarity: Similarity | None = None):
        _check("embeddings", embeddings, dimensions=2 if similarity is None else None)
        if len(embeddings) == 0:
            raise ValueError("embeddings must have at least one row")
        (self._embeddings,) = full_precision(embeddings.detach())
        self._number = len(embeddings)
        self._similarity = similarity
        self._at_a_time = VECTORS_AT_A_TIME if similarity is None else SETS_AT_A_TIME
        if similarity is None and self._number < self._at_a_time:
            missing = -self._number % COLUMNS
            self._embeddings = torch.cat([self._embeddings, self._embeddings.new_zeros(missing, embeddings.shape[1])])

    def __len__(self) -> int:
        return self._number

    @torch.no_grad()
    def search(self, queries: Tensor, top: int) -> Hits:
        """Return the items that are nearest to each query.

        Args:
            queries: (Q, D), or what the similarity takes, such as sets (Q, K, D); on the device of the embeddings.
            top: how many, >= 1; all there are if that is less.

        Raises:
            ValueError: a shape or type does not fit, a query or a similarity is NaN or infinite.

        >>> index = ExactIndex(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> index.search(torch.tensor([[0.8, 0.6]]), top=2)
        Hits(similarities=tensor([[0.8000, 0.8000]]), indices=tensor([[0, 2]]))
        """
        queries, top = _check_queries(queries, self._embeddings, top, len(self))
        found = [self._search(part, top) for part in queries.split(QUERIES_AT_A_TIME)]
        return Hits(*map(torch.cat, zip(*found, strict=True)))

    def _search(self, queries: Tensor, top: int) -> Hits:
        best = None
        for start in range(0, len(self), self._at_a_time):
            # The last part reaches back to be as large as the others.
            first = max(0, min(start, len(self) - self._at_a_time))
            similarities = self._compare(queries, self._embeddings[first : first + self._at_a_time])
            hits = _nearest(similarities[:, start - first : len(self) - first], top)
            hits = hits._replace(indices=hits.indices + start)
            if best is not None:
                # What comes first has the smaller index.
                hits = _in_order(Hits(*(torch.cat(pair, dim=1) for pair in zip(best, hits, strict=True))), top)
            best = hits
        return best

    def _compare(self, queries: Tensor, items: Tensor) -> Tensor:
        with torch.autocast(queries.device.type, enabled=False):
            similarities = queries @ items.T if self._similarity is None else self._similarity(queries, items)
        if similarities.shape != (len(queries), len(items)) or not similarities.is_floating_point():
            raise ValueError(
                f"similarity must return floating-point values of shape {(len(queries), len(items))}, "
                f"got {similarities.dtype} of shape {tuple(similarities.shape)}"
            )
        finite = similarities.isfinite().all(dim=1)
        if not finite.all():
            raise ValueError(f"similarities must be finite; they are not for {count_and_first(~finite)} of the queries")
        return full_precision(similarities)[0]


class FaissIndex:
    """An index of the FAISS library, which finds most of the nearest vectors without a look at all of them.

    The similarities of what it finds are computed again from the embeddings, so that they and their order are exact
    even if the index keeps the vectors compressed. FAISS decides itself how many threads it uses (``OMP_NUM_THREADS``,
    ``faiss.omp_set_num_threads``).

    Args:
        embeddings: (N, D) floating point, on the CPU; unit vectors where the similarity is to be a cosine.
        factory: FAISS's description of an index, such as ``"Flat"``, ``"HNSW32"`` or ``"IVF256,Flat"``; its metric is
            the inner product.

    Raises:
        UserError: FAISS cannot build such an index, or not from so few vectors, or embeddings are sets.
        ValueError: a type is not as above, an embedding holds NaN or infinity, or there is none.
        MissingExtraError: faiss is not installed.
    """

    def __init__(self, embeddings: Tensor, factory: str):
        self._embeddings, self.factory = _vectors(embeddings), factory
        self._index = check_factory(factory, self._embeddings.shape[1])
        array = self._embeddings.numpy()
        with _Reason(f"cannot build the index {factory!r} of {len(array):,} vectors"):
            self._index.train(array)
            self._index.add(array)

    def __len__(self) -> int:
        return len(self._embeddings)

    def set_parameters(self, text: str) -> None:
        """Set how thoroughly FAISS searches: ``"nprobe=16"`` of IVF, ``"efSearch=64"`` of HNSW, several with commas.

        Raises:
            UserError: FAISS does not know a parameter of this index.
        """
        faiss = require("faiss", extra="faiss")
        # FAISS takes any number, and what it cannot interpret in parts.
        if not text.strip() or any(
            not value.strip().isdecimal() or int(value) < 1 for value in re.findall("=([^,]*)", text)
        ):
            raise UserError(f"parameters of the index {self.factory!r} must be whole numbers from 1 on, got {text!r}")
        with _Reason(f"cannot set {text!r} for the index {self.factory!r}"):
            faiss.ParameterSpace().set_index_parameters(self._index, text)

    @torch.no_grad()
    def search(self, queries: Tensor, top: int) -> Hits:
        """Return the items that FAISS finds nearest to each query, at most ``top``.

        Args:
            queries: (Q, D) on the CPU.
            top: how many, >= 1; all there are if that is less. An index that looks only at a part of the items
                can find fewer. Of several that are as near as the last one it finds any.

        Raises:
            UserError: FAISS cannot search with the parameters that are set.
            ValueError: a shape or type does not fit, a query is NaN or infinite.
        """
        queries, top = _check_queries(queries, self._embeddings, top, len(self))
        found = [self._search(part, top) for part in queries.split(QUERIES_AT_A_TIME)]
        return Hits(*map(torch.cat, zip(*found, strict=True)))

    def _search(self, queries: Tensor, top: int) -> Hits:
        with _Reason(f"cannot search the index {self.factory!r}"):
            _, indices = self._index.search(queries.contiguous().numpy(), top)
        # In the order of the indices, which stays where similarities are equal; what is missing is sorted behind them.
        indices = torch.from_numpy(indices).sort(dim=1).values
        # Not a matrix product, which rounds the similarities of equal vectors differently by their place.
        similarities = torch.stack(
            [
                (self._embeddings[found.clamp(min=0)] * query).sum(dim=1)
                for found, query in zip(indices, queries, strict=True)
            ]
        )
        return _in_order(Hits(similarities.masked_fill(indices < 0, -torch.inf), indices), top)

    def write(self, file: str | os.PathLike) -> None:
        """Write the index, and beside it ``<file>.json`` that says of which embeddings it is.

        Raises:
            UserError: a file cannot be written.
        """
        faiss = require("faiss", extra="faiss")
        file, data = Path(file), faiss.serialize_index(self._index).data
        description = {
            "format": SIDECAR,
            "factory": self.factory,
            "vectors": list(self._embeddings.shape),
            "vectors_sha256": _digest(self._embeddings),
            "file_sha256": hashlib.sha256(data).hexdigest(),
            "faiss": faiss.__version__,
        }
        # First, so that an index never stands there as if somebody else had made it.
        write_file(_sidecar(file), json.dumps(description, indent=2).encode())
        write_file(file, data)

    @classmethod
    def read(cls, file: str | os.PathLike, embeddings: Tensor, factory: str) -> "FaissIndex":
        """Read what :meth:`write` wrote, after a look at whether it is an index of these embeddings.

        FAISS does not see the file unless its hash is the one that was written down; whoever can change both files can
        still make FAISS read what they want.

        Args:
            file: of the index; ``<file>.json`` must be there as well.
            embeddings: (N, D), as they were for the index.
            factory: FAISS's description of the index, likewise.

        Raises:
            StaleIndexError: it is of other embeddings or another kind, or damaged.
            UserError: a file cannot be read, or :meth:`write` has not written it.
        """
        faiss = require("faiss", extra="faiss")
        file, vectors = Path(file), _vectors(embeddings)
        description = _read_sidecar(file)
        expected = {"factory": factory, "vectors": list(vectors.shape), "vectors_sha256": _digest(vectors)}
        for name, value in expected.items():
            if description.get(name) != value:
                raise StaleIndexError(f"index {file} is of other {'kind' if name == 'factory' else 'embeddings'}")
        try:
            data = file.read_bytes()
        except OSError as error:
            raise StaleIndexError(f"cannot read index {file}: {error_text(error)}") from error
        if hashlib.sha256(data).hexdigest() != description.get("file_sha256"):
            raise StaleIndexError(f"index {file} has changed since it was written")
        numpy = require("numpy", extra="faiss")
        try:
            with _Reason(f"cannot read index {file}"):
                index = faiss.deserialize_index(numpy.frombuffer(data, dtype=numpy.uint8))
        except UserError as error:  # written by another version of FAISS, perhaps
            raise StaleIndexError(str(error)) from error
        found = (index.ntotal, index.d, index.metric_type, index.is_trained)
        if found != (*vectors.shape, faiss.METRIC_INNER_PRODUCT, True):
            raise StaleIndexError(f"index {file} does not hold what {_sidecar(file).name} says")
        made = cls.__new__(cls)
        made._embeddings, made.factory, made._index = vectors, factory, index
        return made


def build_index(
    features: Features, target: str = "images", *, similarity: Similarity | None = None, faiss: str | None = None
) -> ExactIndex | FaissIndex:
    """Return an index of the images or of the captions.

    Args:
        features: of any model.
        target: ``"images"`` or ``"captions"``.
        similarity: of sets, as for :class:`ExactIndex`; that which the features' description names if left out.
        faiss: as the ``factory`` of :class:`FaissIndex`; an exact search if left out.

    Raises:
        UserError: an unknown target, sets without a similarity or with ``faiss``; see also :class:`FaissIndex`.
    """
    embeddings = getattr(features, check_name("target", target, TARGETS))
    if faiss is not None:
        return FaissIndex(embeddings, faiss)
    return ExactIndex(embeddings, similarity or features.similarity())


def check_factory(factory: str, width: int) -> Any:
    """Return FAISS's empty index for vectors of so many numbers.

    Raises:
        UserError: FAISS does not know such an index, or not by inner product.
        MissingExtraError: faiss is not installed.
    """
    faiss = require("faiss", extra="faiss")
    # With so few FAISS ends the whole process, or searches for ever.
    if re.search(r"(HNSW0*[01]|NSG0*[0-7])(?!\d)", factory):
        raise UserError(f"{factory!r} is no index of FAISS: a graph needs more neighbours, such as HNSW32 or NSG32")
    with _Reason(f"{factory!r} is no index of FAISS for vectors of {width} numbers"):
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"FAISS has the index {factory!r} for Euclidean distances only; name another kind")
    return index


class _Reason:
    """Turns an error of FAISS into ours, with what it says and without where in its sources."""

    def __init__(self, action: str):
        self._action = action

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # An assertion is one of FAISS's Python layer, and a bad_alloc of C++ is a MemoryError.
        if not isinstance(error, (AssertionError, RuntimeError, ValueError, MemoryError)):
            return
        text = " ".join(str(error).split())
        _, place, reason = text.partition(re.search(r" at \S+:\d+: |$", text).group())
        reason = re.sub(r"^Error: (?:'.*?' failed: )?", "", reason if place else text)
        raise UserError(f"{self._action}: {reason or type(error).__name__}") from error


def _vectors(embeddings: Tensor) -> Tensor:
    """Return embeddings as FAISS takes them."""
    if embeddings.ndim == 3:
        raise UserError("FAISS compares single vectors and cannot search sets of them; search sets without FAISS")
    _check("embeddings", embeddings, dimensions=2)
    if len(embeddings) == 0 or embeddings.device.type != "cpu":
        raise ValueError(
            f"embeddings must have at least one row and be on the CPU, got {len(embeddings)} on {embeddings.device}"
        )
    return embeddings.detach().to(torch.float32).contiguous()


def _check(name: str, embeddings: Tensor, dimensions: int | None) -> None:
    right = embeddings.ndim == dimensions if dimensions else embeddings.ndim > 1
    if not right or not embeddings.is_floating_point():
        shape = "(rows, D)" if dimensions == 2 else "(rows, ...)"
        raise ValueError(
            f"{name} must be a floating-point tensor of shape {shape}, got {embeddings.dtype} of shape "
            f"{tuple(embeddings.shape)}"
        )
    check_finite(name, embeddings)


def _check_queries(queries: Tensor, embeddings: Tensor, top: int, number: int) -> tuple[Tensor, int]:
    """Return queries in the type of the embeddings, and how many to look for."""
    _check("queries", queries, dimensions=embeddings.ndim)
    if queries.shape[-1] != embeddings.shape[-1] or queries.device != embeddings.device or len(queries) == 0:
        raise ValueError(
            f"queries must be at least one embedding of width {embeddings.shape[-1]} on {embeddings.device}, "
            f"got shape {tuple(queries.shape)} on {queries.device}"
        )
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    return queries.detach().to(embeddings.dtype), min(top, number)


def _nearest(similarities: Tensor, top: int) -> Hits:
    """Return the largest of each row (Q, n), the first ones of equal ones; at most ``top``."""
    top = min(top, similarities.shape[1])
    # `topk` takes any of equal ones, and in any order.
    values, indices = similarities.topk(top, dim=1)
    tied = (similarities >= values[:, -1:]).sum(dim=1) > top
    if tied.any():
        order = similarities[tied].argsort(dim=1, descending=True, stable=True)[:, :top]
        indices[tied] = order
    indices = indices.sort(dim=1).values
    return _in_order(Hits(similarities.gather(1, indices), indices), top)


def _in_order(hits: Hits, top: int) -> Hits:
    """Sort each row, the largest first and equal ones as they are; keep ``top`` of them."""
    similarities, order = hits.similarities.sort(dim=1, descending=True, stable=True)
    return Hits(similarities[:, :top], hits.indices.gather(1, order)[:, :top])


def _digest(vectors: Tensor) -> str:
    return hashlib.sha256(vectors.numpy().data).hexdigest()


def _sidecar(file: Path) -> Path:
    return file.with_name(f"{file.name}.json")


def _read_sidecar(file: Path) -> dict[str, Any]:
    sidecar = _sidecar(file)
    try:
        description = json.loads(sidecar.read_bytes())
    except FileNotFoundError:
        description = None
    except OSError as error:
        raise UserError(f"cannot read {sidecar}: {error_text(error)}") from error
    except (ValueError, RecursionError):
        description = None
    if not isinstance(description, dict) or description.get("format") != SIDECAR:
        raise UserError(
            f"index {file} is not one that vl-plugins wrote: {sidecar.name} beside it does not say of which embeddings "
            "it is; move it away, or delete it to have it made again"
        )
    return description
