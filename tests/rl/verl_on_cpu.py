"""A platform of verl's for a host without an accelerator: VERL_PLATFORM=cpu, with this module in
VERL_USE_EXTERNAL_MODULES. Its workers are then verl's own, with FSDP2 over gloo."""

import contextlib
import types

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils import import_utils

# verl patches a class of TRL's that TRL has no more.
import_utils.is_trl_available = lambda: False

_init_process_group = torch.distributed.init_process_group


def init_process_group(*arguments, **options):
    """verl names a backend for the CPU and one for the accelerator: here they are one device."""
    return _init_process_group(*arguments, **options | {"backend": "gloo"})


torch.distributed.init_process_group = init_process_group


def nothing(*_, **__):
    return 0


DEVICE = types.SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in torch.cpu.__all__},
    empty_cache=nothing,
    get_device_name=lambda: "CPU",
    get_rng_state=torch.get_rng_state,
    manual_seed=torch.manual_seed,
    max_memory_allocated=nothing,
    max_memory_reserved=nothing,
    mem_get_info=lambda *_: (1 << 30, 1 << 30),
    memory_allocated=nothing,
    memory_reserved=nothing,
    reset_peak_memory_stats=nothing,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "NPU"  # verl counts those or GPUs.

    def ray_resource_options(self, num_gpus):
        return {"resources": {"NPU": num_gpus}}

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing
