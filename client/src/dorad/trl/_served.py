"""Puts dorad in the place of vLLM while a trainer is constructed."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar, cast

from transformers import TrainerCallback

from dorad import Client
from dorad.trl._generation import Generation, Server
from dorad.trl._refusals import UnsupportedError

TrainerClass = TypeVar("TrainerClass", bound=type)

_NAME = "VLLMGeneration"
_replacing = threading.Lock()


def served(
    trainer_class: TrainerClass,
    server: str | Client | None = None,
    *,
    adapter: str | None = None,
    shared_memory: bool = False,
    settings: Mapping[str, object] | None = None,
) -> TrainerClass:
    """The same trainer, whose completions come from a dorad server. vLLM need not be installed.

        GRPOTrainer = dorad.trl.served(GRPOTrainer, "127.0.0.1:50051")

    The trainer's `args` must have `use_vllm=True`, and its model an adapter (`peft_config`). Each
    trainer publishes its policy under a name of its own: when it is constructed, whenever TRL
    synchronises weights, and when training ends. A version is retired when its successor is there.

    Args:
      trainer_class: GRPOTrainer, RLOOTrainer or any other one of TRL's that constructs a
        VLLMGeneration, or a subclass.
      server: "HOST:PORT" of a server of the trainer's base model, or a client of it; default: the
        trainer starts one on its own device and ends it with the process.
      adapter: the name to publish; default: one that no other run has.
      shared_memory: the server runs on this host and reads the adapter from this process's memory
        (server.shared_memory_socket). A server that the trainer starts always does.
      settings: of a server that the trainer starts, as "engine.kv_bytes": "8GiB".

    Returns:
      A subclass of the same name. Its constructor raises UnsupportedError for what cannot be
      honoured, and dorad.InvalidArgument for an adapter that the server refuses.
    """
    if settings and server is not None:
        raise ValueError("settings are for a server that the trainer starts: leave server out")
    place = Server(server, adapter, shared_memory, dict(settings or {}))
    initialise = cast(Any, trainer_class).__init__

    class Served(trainer_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _check_arguments(trainer_class, initialise, self, args, kwargs)
            with _replaced(trainer_class, functools.partial(Generation, self, place)):
                super().__init__(*args, **kwargs)
            generation = getattr(self, "vllm_generation", None)
            if not isinstance(generation, Generation):
                raise TypeError(f"{trainer_class.__name__} constructs no {_NAME}")
            self.add_callback(_PublishAtEnd(generation))

    functools.update_wrapper(Served.__init__, initialise)
    Served.__name__, Served.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    Served.__module__, Served.__doc__ = trainer_class.__module__, trainer_class.__doc__
    return cast(TrainerClass, Served)


def _check_arguments(
    trainer_class: type, initialise: Any, trainer: Any, args: Any, kwargs: Any
) -> None:
    """Before the model is loaded."""
    given = inspect.signature(initialise).bind(trainer, *args, **kwargs).arguments
    if not getattr(given.get("args"), "use_vllm", False):
        raise UnsupportedError(
            [f"{trainer_class.__name__} does not generate with vLLM; set use_vllm=True in its args"]
        )


@contextmanager
def _replaced(trainer_class: type, make: Callable[..., Generation]) -> Iterator[None]:
    """`make` in the place of VLLMGeneration, in every module where the trainer finds it."""
    from trl.generation import vllm_generation as origin

    modules = {sys.modules[each.__module__] for each in trainer_class.__mro__}
    modules.add(origin)  # Some trainers import the class when they are constructed.
    changes: list[tuple[ModuleType, str, Callable[..., Any]]]
    changes = [(module, _NAME, make) for module in modules if hasattr(module, _NAME)]
    changes += [
        (module, "is_vllm_available", lambda *_, **__: True)
        for module, _, _ in changes
        if hasattr(module, "is_vllm_available") and module is not origin
    ]
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
