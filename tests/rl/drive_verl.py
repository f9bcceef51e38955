"""verl's rollout without its training: configuration, workers, servers and clients for real.

Arguments: model folder, adapters' root. A worker holds the model as verl's does without FSDP, and
sends its weights in the order of ActorRolloutRefWorker.update_weights. Prints the answers.
"""

import asyncio
import json
import sys
from pathlib import Path

import dorad
import psutil
import ray
import verl
from hydra import compose, initialize_config_dir
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.fsdp_utils import collect_lora_params, replace_lora_wrapper
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

FOLDER, ROOT = sys.argv[-2:]  # workers of drive_verl_images have other arguments
PROMPT = [1, 40, 77, 120, 33]
LONG = 600
SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
}

OPTIONS = [
    f"actor_rollout_ref.model.path={FOLDER}",
    "actor_rollout_ref.model.external_lib=dorad.verl",
    "actor_rollout_ref.model.lora_rank=4",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.rollout.name=dorad",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.prompt_length=32",
    "actor_rollout_ref.rollout.response_length=900",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.kv_bytes=64MiB",
    "+actor_rollout_ref.rollout.engine_kwargs.dorad.engine.threads=1",
]


class PolicyWorker(Worker):
    """What ActorRolloutRefWorker does about weights, with PEFT's model in one process."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.module = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        model_config = omega_conf_to_dataclass(self.config.model)
        rollout_config = omega_conf_to_dataclass(self.config.rollout)
        rollout_class = get_rollout_class(rollout_config.name, rollout_config.mode)
        self.rollout = rollout_class(
            config=rollout_config, model_config=model_config, device_mesh=None
        )
        self.base_sync_done = "dummy" not in rollout_config.load_format

    def load(self, adapter, spoilt):
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        if spoilt:
            with torch.no_grad():
                base.get_input_embeddings().weight[3, 5] += 0.25
        self.module = PeftModel.from_pretrained(base, f"{ROOT}/{adapter}", is_trainable=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, adapter, global_steps, spoilt=False, merged=False, rank=None):
        self.load(adapter, spoilt)
        peft_config = None if merged else self.module.peft_config["default"]
        if rank is not None:
            peft_config.r = rank  # Not that of its tensors.
        await self.rollout.resume(tags=["weights"])
        if spoilt or not self.base_sync_done:
            params = collect_lora_params(self.module, layered_summon=False, base_sync_done=False)
            base = ((replace_lora_wrapper(name, peft_config), p) for name, p in params.items())
            await self.rollout.update_weights(
                base, peft_config=peft_config, base_sync_done=False, global_steps=global_steps
            )
        params = collect_lora_params(self.module, layered_summon=False, base_sync_done=True)
        await self.rollout.update_weights(
            params.items(), peft_config=peft_config, base_sync_done=True, global_steps=global_steps
        )
        await self.rollout.resume(tags=["kv_cache"])
        self.base_sync_done = True


def configuration(*changes):
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(folder, version_base=None):
        return compose("ppo_trainer", [*OPTIONS, *changes])


def plain(output):
    return {
        "tokens": output.token_ids,
        "logprobs": output.log_probs,
        "reason": output.stop_reason,
        "steps": output.extra_fields["global_steps"],
        "oldest": output.extra_fields["min_global_steps"],
    }


def refusal(work):
    """The message of the failure that must come, without Ray's traceback."""
    try:
        work()
    except Exception as error:
        return str(getattr(error, "cause", error))
    raise AssertionError("nothing was refused")


class Session:
    """The driver: verl's clients, a replica, and the server behind it."""

    def __init__(self, config, worker=PolicyWorker):
        self.group = RayWorkerGroup(
            resource_pool=RayResourcePool([1], use_gpu=False),
            ray_cls_with_init=RayClassWithInitArgs(
                ray.remote(worker), config=config.actor_rollout_ref
            ),
        )
        self.group.init_model()
        self.manager = LLMServerManager.create(config=config, worker_group=self.group)
        self.client = self.manager.get_client()
        (self.replica,) = self.manager.get_replicas()
        (self.server,) = self.manager.server_handles
        self.dorad = dorad.Client(ray.get(self.server.target.remote()))

    async def generate(self, client=None, **changes):
        params = SAMPLING | {"logprobs": True, "max_tokens": 24} | changes
        output = await (client or self.client).generate(
            request_id="session", prompt_ids=PROMPT, sampling_params=params
        )
        return plain(output)

    async def several(self):
        return await asyncio.gather(*(self.generate() for _ in range(4)))

    async def long(self, client=None):
        """A request that has generated tokens, and does not end soon."""
        task = asyncio.create_task(self.generate(client, max_tokens=LONG))
        pages = self.dorad.info().engine.kv_pages_used
        while self.dorad.info().engine.kv_pages_used < pages + 3:
            assert not task.done(), task
            await asyncio.sleep(0.02)
        return task

    async def update(self, *arguments, **options):
        await asyncio.to_thread(lambda: ray.get(self.group.update_weights(*arguments, **options)))

    async def refused(self, call, **options):
        return await asyncio.to_thread(refusal, lambda: asyncio.run(call(**options)))


async def policies(session, found):
    """The synchronous trainer: sleep, train, update, generate."""
    found["early"] = await session.refused(session.generate)
    await session.replica.sleep()
    found["sleeping"] = session.dorad.info().engine.sleeping
    await session.update("dora-0", 1)
    found["awake"] = session.dorad.info().engine.sleeping
    found["first"] = await session.several()
    found["greedy"] = await session.generate(temperature=0, top_p=1.0, max_tokens=8)
    await session.replica.sleep()
    waiting = asyncio.create_task(session.generate())
    while not session.dorad.info().engine.queued_requests:
        await asyncio.sleep(0.02)
    found["waits"] = not waiting.done()
    await session.update("dora-1", 2)
    found["waited"] = await waiting
    found["second"] = await session.several()


async def aborts(session, found):
    """The asynchronous trainer: abort, update, go on."""
    task = await session.long()
    await session.replica.abort_all_requests()
    found["aborted"] = await task
    await session.replica.resume_generation()
    resuming = session.manager.get_client(FullyAsyncLLMServerClient)
    task = await session.long(resuming)
    await session.replica.abort_all_requests()
    await session.update("lora-0", 3)
    held = asyncio.create_task(session.generate())
    await session.replica.resume_generation()
    found["held"] = await held
    found["resumed"] = await task
    await session.replica.sleep()
    waiting = asyncio.create_task(session.generate())
    while not session.dorad.info().engine.queued_requests:
        await asyncio.sleep(0.02)
    await session.replica.abort_all_requests()
    found["early_abort"] = await waiting
    await session.replica.wake_up()
    await session.replica.abort_all_requests(reject_request=True)
    found["rejected"] = await session.generate()
    await session.replica.resume_generation()
    found["third"] = await session.several()


async def seeds(session, found):
    """full_determinism: as verl's v1 trainer, all requests have one id."""
    await session.server.__ray_call__.remote(
        lambda self: setattr(self._config, "full_determinism", True)
    )
    params = SAMPLING | {"max_tokens": 12}
    for name in "drawn", "redrawn":
        await session.update("dora-0", 4)
        answers = [session.server.generate.remote(PROMPT, params, "det-0") for _ in range(4)]
        found[name] = sorted(output.token_ids for output in await asyncio.gather(*answers))
    await session.server.__ray_call__.remote(
        lambda self: setattr(self._config, "full_determinism", False)
    )


async def refusals(session, found):
    other = configuration(
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.model.lora_rank=0",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "actor_rollout_ref.rollout.quantization=fp8",
    ).actor_rollout_ref
    rollout = omega_conf_to_dataclass(other.rollout)
    replica_class = get_rollout_replica_class("dorad")
    found["settings"] = [
        refusal(lambda: replica_class(0, other.rollout, other.model)),
        refusal(
            lambda: get_rollout_class("dorad")(
                config=rollout, model_config=omega_conf_to_dataclass(other.model), device_mesh=None
            )
        ),
    ]
    ours = configuration().actor_rollout_ref
    found["roles"] = [
        refusal(lambda: replica_class(0, ours.rollout, ours.model, is_reward_model=True)),
        await session.refused(replica_class(0, ours.rollout, ours.model).init_standalone),
    ]
    found["parameter"] = await session.refused(session.generate, guided_json="{}")
    found["image"] = await asyncio.to_thread(
        refusal,
        lambda: ray.get(session.server.generate.remote(PROMPT, {}, "image", image_data=["x"])),
    )
    found["base"], found["merged"], found["adapter"] = [
        await asyncio.to_thread(
            refusal, lambda o=o: ray.get(session.group.update_weights("dora-0", 4, **o))
        )
        for o in ({"spoilt": True}, {"merged": True}, {"rank": 5})
    ]
    found["after"] = await session.generate()


async def end(session, found):
    """The server ends with its actor."""
    (child,) = [
        pid for pid in await session.server.__ray_call__.remote(children) if psutil.pid_exists(pid)
    ]
    ray.kill(session.server)
    gone, _ = psutil.wait_procs([psutil.Process(child)], timeout=100)
    found["ended"] = len(gone) == 1


def children(server):
    return [child.pid for child in psutil.Process().children() if child.name() == "dorad"]


async def main(session):
    found = {}
    for part in policies, aborts, refusals, seeds, end:
        await part(session, found)
    return found


if __name__ == "__main__":
    # The processors that verl asks for are Ray's bookkeeping.
    ray.init(num_cpus=32, include_dashboard=False, object_store_memory=128 << 20)
    config = configuration()
    # As the trainer's driver does for its tokenizer: it imports external_lib.
    omega_conf_to_dataclass(config.actor_rollout_ref.model)
    print(json.dumps(asyncio.run(main(Session(config)))))
