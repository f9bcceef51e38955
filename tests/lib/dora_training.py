"""Small DoRA models for the tests of dorad.train, and steps of training to compare."""

import contextlib
import dataclasses
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

VOCABULARY = 37


class Linears(nn.Module):
    """With a bias and without, in both layouts of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 40)
        self.middle = Conv1D(32, 40)  # fan_in_fan_out
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.middle(torch.tanh(self.up(x)))))


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: its forward multiplies."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.register_buffer("embed_scale", torch.tensor(1.75), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(VOCABULARY, 24, padding_idx=0)
        self.scaled = ScaledEmbedding(VOCABULARY, 24)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.plain(ids)) * self.scaled(ids)


class Convolutions(nn.Module):
    """Of `dims` dimensions: strided and padded, grouped, and with a kernel of one."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.strided = kind(4, 8, 3, stride=2, padding=1)
        self.grouped = kind(8, 12, 3, padding=1, groups=4, bias=False)
        self.pointwise = kind(12, 6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pointwise(torch.tanh(self.grouped(torch.tanh(self.strided(x)))))


def inputs(model: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    """For one of the models above; wants a gradient unless it is token ids."""
    made = torch.Generator().manual_seed(seed)
    if isinstance(model, Embeddings):
        return torch.randint(0, VOCABULARY, (3, 11), generator=made)
    if isinstance(model, Convolutions):
        dims = model.strided.weight.dim() - 2
        shape = (2, 4) + (7,) * dims
    else:
        shape = (3, 5, 24)
    return torch.randn(shape, generator=made, dtype=dtype).requires_grad_()


def adapted(
    base: nn.Module, seed: int = 1, autocast_adapter_dtype: bool = True, **options
) -> PeftModel:
    """`base` with a DoRA adapter on every layer, far from its initial values.

    `options` are LoraConfig's; of a pattern only the keys that the base has count.
    """
    kinds = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    targets = [name for name, module in base.named_modules() if isinstance(module, kinds)]
    settings = dict(r=4, lora_alpha=6, use_dora=True, target_modules=targets) | options
    for pattern in settings.keys() & {"rank_pattern", "alpha_pattern"}:
        settings[pattern] = {k: v for k, v in settings[pattern].items() if k in targets}
    config = LoraConfig(**settings)
    model = get_peft_model(base, config, autocast_adapter_dtype=autocast_adapter_dtype)
    perturb(model, seed)
    return model


def perturb(model: nn.Module, seed: int = 1) -> None:
    """Moves A, B and the magnitudes as training might: with B = 0 and g = 1 nothing would show."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                factor = 0.6 + 0.8 * torch.rand(parameter.shape, generator=made)
                parameter.mul_(factor.to(parameter))
            elif "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=made).to(parameter))


@dataclasses.dataclass
class Result:
    """An output and the gradients by parameter; `input` is the input's."""

    output: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model: nn.Module, x: torch.Tensor, seed: int = 3, context=None) -> Result:
    """One forward and backward, with the same dropout for the same seed."""
    model.zero_grad()
    if x.requires_grad:
        x.grad = None
    torch.manual_seed(seed)
    with context or contextlib.nullcontext():
        output = model(x)
    # In fp16 linspace itself would overflow.
    dtype = torch.promote_types(output.dtype, torch.float32)
    weights = torch.linspace(-1, 1, output.numel(), dtype=dtype, device=output.device)
    weights = weights.view(output.shape).to(output.dtype)
    (output * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if x.requires_grad:
        gradients["input"] = x.grad.clone()
    return Result(output.detach().clone(), gradients)


def descend(
    optimizer: torch.optim.Optimizer, steps: int, loss_of: Callable[[], torch.Tensor]
) -> list[float]:
    """Steps of training. Returns the loss before each."""
    losses = []
    for _ in range(steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(got: Result, wanted: Result, tolerance: float) -> None:
    """Everything within `tolerance` times its tensor's largest value."""
    assert got.gradients.keys() == wanted.gradients.keys()
    pairs = {"output": (got.output, wanted.output)}
    pairs |= {n: (got.gradients[n], g) for n, g in wanted.gradients.items()}
    far = {n: distance(a, b) for n, (a, b) in pairs.items() if not distance(a, b) <= tolerance}
    assert not far, far


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in units of the largest wanted value."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    scale = wanted.double().abs().max().clamp_min(1e-300)
    return ((got.double() - wanted.double()).abs().max() / scale).item()
