"""The two clients have the same surface."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import dorad
import dorad.aio
import pytest

ROOT = Path(__file__).resolve().parents[2]

CLASSES = ["Client", "Fleet", "RolloutPool", "Stream"]

SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}

# What their docstrings say of threads and event loops differs, and one default.
OWN_WORDS = {"Client", "Fleet", "RolloutPool", "Stream"}
OWN_WORDS |= {"Client.generate_many", "Client.limited_gpu_share", "RolloutPool.generate_many"}
OWN_WORDS |= {"Fleet.generate_many"}
OWN_DEFAULTS = {("Client.generate_many", "concurrency")}


def public(cls):
    found = {}
    for name, member in inspect.getmembers(cls):
        if name[0] != "_" or name in SPECIAL or name in SPECIAL.values():
            found[SPECIAL.get(name, name)] = member
    return found


def pairs():
    for name in CLASSES:
        sync, aio = public(getattr(dorad, name)), public(getattr(dorad.aio, name))
        for method in sync.keys() & aio.keys():
            yield f"{name}.{method}", sync[method], aio[method]


def plain(text):
    """Without what makes it asynchronous."""
    text = text.replace("an `async ", "a `")
    return re.sub(r"\b(async|await) |Async(?=ContextManager)", "", text)


def words(member):
    return " ".join(inspect.getdoc(member).split())


@pytest.mark.parametrize("name", CLASSES)
def test_both_have_the_same_methods(name):
    assert public(getattr(dorad, name)).keys() == public(getattr(dorad.aio, name)).keys()


@pytest.mark.parametrize("name", CLASSES)
def test_both_are_made_from_the_same_arguments(name):
    of_sync = inspect.signature(getattr(dorad, name))
    assert str(of_sync) == str(inspect.signature(getattr(dorad.aio, name)))


def test_their_methods_have_the_same_parameters_and_results():
    for name, sync, aio in pairs():
        if not callable(sync):
            assert type(sync) is type(aio), name
            continue
        ours, theirs = inspect.signature(sync), inspect.signature(aio)
        assert list(ours.parameters) == list(theirs.parameters), name
        assert plain(str(ours.return_annotation)) == plain(str(theirs.return_annotation)), name
        for parameter in ours.parameters.values():
            other = theirs.parameters[parameter.name]
            assert (parameter.kind, parameter.annotation) == (other.kind, other.annotation), name
            if (name, parameter.name) not in OWN_DEFAULTS:
                assert parameter.default == other.default, (name, parameter.name)


def test_nothing_of_the_synchronous_one_has_to_be_awaited():
    for name, sync, aio in pairs():
        kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        assert not any(kind(sync) for kind in kinds), name
        assert not inspect.isasyncgenfunction(aio), name


def test_their_methods_have_the_same_docstrings():
    for name in CLASSES:
        assert getattr(dorad, name).__doc__ and getattr(dorad.aio, name).__doc__
    for name, sync, aio in pairs():
        if name.partition(".")[2].startswith("_"):
            continue
        assert inspect.getdoc(sync), f"{name} has none"
        if name not in OWN_WORDS:
            assert words(sync) == plain(words(aio)), name


@pytest.fixture(scope="module")
def sync_source():
    sys.path.insert(0, str(ROOT / "client"))
    try:
        yield importlib.import_module("sync_source")
    finally:
        sys.path.remove(str(ROOT / "client"))


def test_the_synchronous_client_is_the_asyncio_one_without_async(sync_source):
    text = '''
from dorad._aio.x import A
from dorad._asyncio import b


class X:
    """Use it in `async with`."""

    async def __aenter__(self, f: Callable[[], Awaitable[list[t[int]]]]) -> AsyncIterator[T]:
        async with a, await f(await b()) as c:  # To await it.
            async for x in c[await d[0]]:
                return await x
        raise StopAsyncIteration
'''
    assert (
        sync_source.synchronous("x.py", text).partition("\n")[2]
        == '''
from dorad._sync.x import A
from dorad._threads import b


class X:
    """Use it in `with`."""

    def __enter__(self, f: Callable[[], list[t[int]]]) -> Iterator[T]:
        with a, f(b()) as c:  # To it.
            for x in c[d[0]]:
                return x
        raise StopIteration
'''
    )


def test_a_passage_that_is_gone_is_told(sync_source):
    with pytest.raises(ValueError, match=r"client\.py: not there once: 'A connection"):
        sync_source.synchronous("client.py", "class Client: ...\n")


def test_modules_that_have_gone_are_removed_and_others_are_not_touched(sync_source, tmp_path):
    source, out = tmp_path / "_aio", tmp_path / "_sync"
    source.mkdir()
    for name in ("a.py", "b.py"):
        (source / name).write_text("async def f(): ...\n")
    sync_source.generate(source, out)
    assert (out / "a.py").read_text().endswith("\ndef f(): ...\n")
    (source / "b.py").unlink()
    before = (out / "a.py").stat().st_mtime_ns
    sync_source.generate(source, out)
    assert [path.name for path in out.iterdir()] == ["a.py"]
    assert (out / "a.py").stat().st_mtime_ns == before
