"""Puts dorad in the place of vLLM while a trainer is constructed."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast

from transformers import TrainerCallback

from dorad import Answers, Client
from dorad._unsupported import UnsupportedError
from dorad.trl import _asynchronous
from dorad.trl._generation import Generation, Server

TrainerClass = TypeVar("TrainerClass", bound=type)

Change = tuple[ModuleType, str, Any]  # of a module's name

_NAME = "VLLMGeneration"
_AVAILABLE = "is_vllm_available"
_SELECT = "select_adapter_sync"  # Asynchronous trainers have it.
_replacing = threading.Lock()


def served(
    trainer_class: TrainerClass,
    server: str | Client | None = None,
    *,
    adapter: str | None = None,
    shared_memory: bool = False,
    settings: Mapping[str, object] | None = None,
    answers: Answers | None = None,
) -> TrainerClass:
    """The same trainer, whose completions come from a dorad server. vLLM need not be installed.

        GRPOTrainer = dorad.trl.served(GRPOTrainer, "127.0.0.1:50051")

    The trainer's `args` must have `use_vllm=True`, and the model an adapter (`peft_config`).
    Each trainer publishes its policy under a name of its own: when it is constructed, whenever TRL
    synchronises weights, and when training ends. A version is retired when its successor is there.

    An asynchronous trainer has no `use_vllm`. It generates over HTTP, through a gateway (`doractl
    gateway`) at its `vllm_server_base_url`; `server` is the server behind it, to which the policy
    is published.

    Args:
      trainer_class: GRPOTrainer, RLOOTrainer, AsyncGRPOTrainer or any other one of TRL's that
        generates with vLLM, or a subclass.
      server: "HOST:PORT" of a server of the trainer's base model, or a client of it; default: the
        trainer starts one on its own device and ends it with the process.
      adapter: the name to publish; default: one that no other run has.
      shared_memory: the server runs on this host and reads the adapter from this process's memory
        (server.shared_memory_socket). A server that the trainer starts always does.
      settings: of a server that the trainer starts, as "engine.kv_bytes": "8GiB".
      answers: those of earlier steps, for prompts that come again: they become drafts. Then a
        prompt has the same seed at every step. See docs/guides/trl.md, "Several epochs".

    Returns:
      A subclass of the same name. Its constructor raises UnsupportedError for what cannot be
      honoured, and dorad.InvalidArgument for an adapter that the server refuses.

    Raises:
      ValueError: `settings` with `server`; `answers`, `shared_memory` or no `server` with an
        asynchronous trainer.
    """
    if settings and server is not None:
        raise ValueError("settings are for a server that the trainer starts: leave server out")
    place = Server(server, adapter, shared_memory, dict(settings or {}), answers)
    asynchronous = any(hasattr(module, _SELECT) for module in _modules(trainer_class))
    if asynchronous and (server is None or shared_memory):
        raise ValueError(
            f"{trainer_class.__name__} generates through a gateway: give served() the address of "
            "the server behind it, without shared_memory"
        )
    if asynchronous and answers is not None:
        raise ValueError(
            f"answers: {trainer_class.__name__} generates in another process, through a gateway"
        )
    initialise = cast(Any, trainer_class).__init__

    class Served(trainer_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(initialise).bind(self, *args, **kwargs).arguments
            if asynchronous:
                _check_asynchronous(given)
                with _replaced(_asynchronous_seam(trainer_class, cast(Any, server))):
                    super().__init__(*args, **kwargs)
                _asynchronous.rename(self, adapter)
                return
            _check_synchronous(trainer_class, given)
            with _replaced(_seam(trainer_class, functools.partial(Generation, self, place))):
                super().__init__(*args, **kwargs)
            generation = getattr(self, "vllm_generation", None)
            if not isinstance(generation, Generation):
                raise TypeError(f"{trainer_class.__name__} constructs no {_NAME}")
            self.add_callback(_PublishAtEnd(generation))

    functools.update_wrapper(Served.__init__, initialise)
    Served.__name__, Served.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    Served.__module__, Served.__doc__ = trainer_class.__module__, trainer_class.__doc__
    return cast(TrainerClass, Served)


# --- Checks before a model is loaded --------------------------------------------------------------


def _check_synchronous(trainer_class: type, given: Mapping[str, Any]) -> None:
    if not getattr(given.get("args"), "use_vllm", False):
        raise UnsupportedError(
            [f"{trainer_class.__name__} does not generate with vLLM; set use_vllm=True in its args"]
        )


def _check_asynchronous(given: Mapping[str, Any]) -> None:
    if given.get("peft_config") is None:
        raise UnsupportedError(
            ["dorad serves LoRA and DoRA over a fixed base model; give the trainer a peft_config"]
        )
    if given.get("weight_transfer") is not None:
        raise UnsupportedError(["the policy is published in place of a weight_transfer; unset it"])


# --- What is replaced -----------------------------------------------------------------------------


def _modules(trainer_class: type) -> set[ModuleType]:
    return {sys.modules[each.__module__] for each in trainer_class.__mro__}


def _seam(trainer_class: type, make: Callable[..., Generation]) -> list[Change]:
    """`make` in the place of VLLMGeneration, in every module where the trainer finds it."""
    from trl.generation import vllm_generation as origin

    found = [module for module in _modules(trainer_class) if hasattr(module, _NAME)]
    changes: list[Change] = [(module, _NAME, make) for module in found]
    changes += [(module, _AVAILABLE, _yes) for module in found if hasattr(module, _AVAILABLE)]
    # Some trainers import the class when they are constructed.
    return [*changes, (origin, _NAME, make)]


def _asynchronous_seam(trainer_class: type, server: str | Client) -> list[Change]:
    client = Client(server) if isinstance(server, str) else server

    def connect(url: str, timeout: float = 240.0) -> _asynchronous.PolicyClient:
        return _asynchronous.PolicyClient(client, timeout)

    changes: list[Change] = []
    for module in _modules(trainer_class):
        if hasattr(module, _SELECT):
            changes.append((module, _SELECT, _asynchronous.select_adapter_sync))
            changes.append((module, "VLLMClient", connect))
            worker = sys.modules[module.AsyncRolloutWorker.__module__]
            changes.append((worker, _AVAILABLE, _yes))
    return changes


def _yes(*_: Any, **__: Any) -> bool:
    return True


@contextmanager
def _replaced(changes: Sequence[Change]) -> Iterator[None]:
    with _replacing:
        before = [(module, name, getattr(module, name)) for module, name, _ in changes]
        try:
            for module, name, value in changes:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


class _PublishAtEnd(TrainerCallback):
    """TRL synchronises weights before it generates: the last ones it would not."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._generation.sync_weights()
