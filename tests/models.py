"""Small models that every test folder runs: `MODELS[name]()` returns `(model, args, kwargs)`, in train mode.

Weights come from a fixed seed, so two calls build equal models. Models of transformers are unmodified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Sample = tuple[Any, tuple[Any, ...], dict[str, Any]]
Builder = Callable[[], Sample]

MODELS: dict[str, Builder] = {}


def register(builder: Builder) -> Builder:
    """Adds a builder to `MODELS` under its own name; the seed is the same for each, the caller's is kept."""

    def build() -> Sample:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return builder()

    MODELS[builder.__name__] = build
    return build


# -- written by hand -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, p: float, is_causal: bool = True):
        super().__init__()
        self.heads = heads
        self.p = p
        self.is_causal = is_causal
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, dropout_p=p)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, p)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(p))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Learned positions, dropout, output head tied to the embedding, loss inside when given targets."""

    def __init__(self, vocab: int = 32, width: int = 16, heads: int = 2, depth: int = 3, p: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(16, width)
        self.drop = nn.Dropout(p)
        self.blocks: Any = nn.ModuleList(GptBlock(width, heads, p) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, targets=None):
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@register
def gpt() -> Sample:
    return Gpt(), (torch.randint(0, 32, (2, 8)),), {}


@register
def gpt_loss() -> Sample:
    ids = torch.randint(0, 32, (2, 8))
    return Gpt(), (ids,), {"targets": ids.roll(-1, 1)}


@register
def mlp() -> Sample:
    layers = [nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3)]
    return nn.Sequential(*layers), (torch.randn(4, 6),), {}


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.act(y)


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


@register
def cnn() -> Sample:
    return Cnn(), (torch.randn(2, 3, 8, 8),), {}


@register
def torch_encoder() -> Sample:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, (torch.randn(2, 5, 16),), {}


@register
def torch_encoder_padded() -> Sample:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return model, (torch.randn(2, 5, 16),), {"src_key_padding_mask": padding}


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        x, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(x), hidden


@register
def lstm() -> Sample:
    return Lstm(), (torch.randint(0, 11, (2, 5)),), {}


# -- of transformers -----------------------------------------------------------------------------------------


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _ids(vocab: int = 64, shape: tuple[int, int] = (2, 7)) -> torch.Tensor:
    return torch.randint(3, vocab, shape)


_DECODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def _llama(**changes: Any) -> nn.Module:
    tf = _transformers()
    return tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER | changes)).train()


@register
def llama() -> Sample:
    return _llama(), (), {"input_ids": _ids()}


@register
def llama_labels() -> Sample:
    ids = _ids()
    return _llama(attention_dropout=0.1), (), {"input_ids": ids, "labels": ids}


@register
def llama_padded() -> Sample:
    ids, mask = _ids(), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 4:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return _llama(), (), {"input_ids": ids, "attention_mask": mask, "labels": labels}


@register
def llama_unpadded() -> Sample:
    return _llama(), (), {"input_ids": _ids(), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}


@register
def qwen2() -> Sample:
    tf = _transformers()
    model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**_DECODER, tie_word_embeddings=True)).train()
    return model, (), {"input_ids": _ids()}


@register
def t5_labels() -> Sample:
    tf = _transformers()
    config = tf.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = tf.T5ForConditionalGeneration(config).train()
    return model, (), {"input_ids": _ids(), "labels": _ids(shape=(2, 5))}


@register
def vit_labels() -> Sample:
    tf = _transformers()
    config = tf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    model = tf.ViTForImageClassification(config).train()
    return model, (), {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([1, 4])}


# -- structure -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One linear and an activation, with a skip: the smallest thing worth repeating."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Stack(nn.Module):
    """Embeds, runs blocks, projects; the other models below change one thing of it."""

    def __init__(self, depth: int = 3, width: int = 4):
        super().__init__()
        self.stem = nn.Linear(3, width)
        self.blocks: Any = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3)))


@register
def stack() -> Sample:
    return Stack(), (_x(),), {}


@register
def tied_blocks() -> Sample:
    model = Stack()
    model.blocks[2].fc.weight = model.blocks[0].fc.weight
    return model, (_x(),), {}


@register
def block_called_twice() -> Sample:
    model = Stack(2)
    model.blocks.append(model.blocks[0])
    return model, (_x(),), {}


class SharedScale(Stack):
    """A parameter of the root that two blocks and the end of the forward read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x * self.scale)
        return self.head(x - self.scale)


@register
def shared_parameter() -> Sample:
    return SharedScale(), (_x(),), {}


@register
def unused_parameter() -> Sample:
    model = Stack()
    model.blocks[1].spare = nn.Parameter(torch.ones(3))
    model.unused = nn.Linear(3, 3)
    return model, (_x(),), {}


@register
def frozen_first() -> Sample:
    model = Stack()
    model.stem.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model, (_x(),), {}


@register
def frozen_bias() -> Sample:
    model = Stack()
    for block in model.blocks:
        block.fc.bias.requires_grad_(False)
    return model, (_x(),), {}


@register
def all_frozen() -> Sample:
    return Stack().requires_grad_(False), (_x(),), {}


class EncoderDecoder(nn.Module):
    """Every decoder block reads what the encoder made at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(nn.Bilinear(4, 4, 4) for _ in range(2))

    def forward(self, source, target):
        for block in self.encoder:
            source = block(source)
        for block in self.decoder:
            target = target + block(target, source)
        return target


@register
def encoder_decoder() -> Sample:
    return EncoderDecoder(), (_x(2, 4), _x(2, 4)), {}


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x):
        skips = []
        for block in self.down:
            x = F.silu(block(x))
            skips.append(x)
        for block in self.up:
            x = F.silu(block(torch.cat([x, skips.pop()], -1)))
        return x


@register
def unet() -> Sample:
    return UNet(), (_x(2, 4),), {}


class Masked(Stack):
    """Takes another road when nothing is masked."""

    def forward(self, x, mask):
        if not mask.all():
            x = x * mask
        return super().forward(x)


@register
def mask_read() -> Sample:
    return Masked(), (_x(), torch.tensor([True, False, True])), {}


@register
def mask_read_true() -> Sample:
    return Masked(), (_x(), torch.tensor([True, True, True])), {}


class LengthRead(Stack):
    """Splits by lengths that it reads from an input, some after arithmetic on it."""

    def forward(self, x, lengths):
        x = x / float((lengths + 1).max())
        return torch.cat([super(LengthRead, self).forward(part) for part in x.split(lengths.tolist())])


@register
def lengths_read() -> Sample:
    return LengthRead(), (_x(3, 3), torch.tensor([1, 2])), {}


class Straight(torch.autograd.Function):
    """Rounds, and lets a scaled gradient through: its backward is not its forward's derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.scale, None


class Rounding(Block):
    def forward(self, x):
        return Straight.apply(super().forward(x), 0.5)


@register
def custom_function() -> Sample:
    model = Stack()
    model.blocks = nn.ModuleList(Rounding() for _ in range(2))
    return model, (_x(),), {}


class Ema(Block):
    """Re-binds one buffer and writes another in place; the output depends on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.steps += 1
        return super().forward(x - self.mean)


@register
def ema_buffer() -> Sample:
    model = Stack()
    model.blocks = nn.ModuleList(Ema() for _ in range(2))
    return model, (_x(),), {}


class Inplace(Block):
    """Writes into its own input."""

    def forward(self, x):
        x += 1
        x.mul_(0.5)
        return super().forward(x)


@register
def inplace_input() -> Sample:
    model = Stack()
    model.blocks = nn.ModuleList(Inplace() for _ in range(3))
    return model, (_x(),), {}


class AliasedWrite(Stack):
    """Another name for a block's input is still in use after the block wrote into it."""

    def forward(self, x):
        x = self.stem(x)
        first = x[:, :2]
        for block in self.blocks:
            x = block(x)
        return self.head(x) + first


@register
def aliased_inplace() -> Sample:
    model = AliasedWrite()
    model.blocks = nn.ModuleList(Inplace() for _ in range(2))
    return model, (_x(),), {}


class WeightView(Stack):
    """A view of a parameter made at the start and read by several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        rows = self.table.t()[:2]
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + rows[0] - rows[1]
        return self.head(x)


@register
def parameter_view() -> Sample:
    return WeightView(), (_x(),), {}


class NoGrad(Stack):
    """A region without gradients, and one with them inside it."""

    def forward(self, x):
        x = self.stem(x)
        with torch.no_grad():
            gate = torch.sigmoid(self.blocks[0](x))
            with torch.enable_grad():
                side = self.blocks[1](x)
        return self.head(self.blocks[2](x * gate) + side)


@register
def no_grad_region() -> Sample:
    return NoGrad(), (_x(),), {}


class Autocast(Stack):
    """bf16 inside, and fp32 again inside that."""

    def forward(self, x):
        x = self.stem(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.blocks[1](x.float())
            x = self.blocks[2](x)
        return self.head(x.float())


@register
def autocast_region() -> Sample:
    return Autocast(), (_x(),), {}


class Duo(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    extras: dict[str, Any]
    loss: torch.Tensor | None = None


class Nested(Stack):
    def forward(self, x):
        y = super().forward(x)
        pair = Duo(y, y * 2)
        return Result(y, {"pair": pair, "list": [y, (y.sum(), "name", 3)], "none": None}, y.mean())


@register
def nested_outputs() -> Sample:
    return Nested(), (_x(),), {}


class Collecting(Stack):
    """Blocks leave what they compute in a dict and an attribute; the end adds it up."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[int, torch.Tensor] = {}

    def forward(self, x):
        self.collected.clear()
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            self.collected[i] = block.fc(x).square().mean()
            self.latest = x
        return self.head(x) + sum(self.collected.values()) + self.latest.mean()


@register
def hidden_collected() -> Sample:
    return Collecting(), (_x(),), {}


class Options(Stack):
    def forward(self, x, scale, mode="none", *, sizes=(), switch=None, shift=None):
        x = x * scale
        if mode == "tanh":
            x = x.tanh()
        if switch is None:
            x = x.view(sizes)
        return super().forward(x) + (0 if shift is None else shift["by"])


@register
def non_tensor_arguments() -> Sample:
    kwargs: dict[str, Any] = {"sizes": (1, 2, 3), "switch": None, "shift": {"by": torch.ones(2)}}
    return Options(), (_x(), 1.5, "tanh"), kwargs


class Returns(Stack):
    """Returns an input, a parameter, a buffer, integers and a detached value next to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x):
        y = super().forward(x) + self.offset
        return y, x, self.head.weight, self.offset, y.argmax(-1), y.detach()


@register
def returns_everything() -> Sample:
    return Returns(), (_x(),), {}


class ViewsOut(Stack):
    """Two views of one tensor cross blocks, and overlapping views are returned."""

    def forward(self, x):
        x = self.stem(x)
        left, right = x.chunk(2, -1)
        x = torch.cat([right, left], -1)
        for block in self.blocks:
            x = block(x)
        y = self.head(x + left.mean())
        return y, y[0], y.t()


@register
def views() -> Sample:
    return ViewsOut(), (_x(),), {}


@register
def input_requires_grad() -> Sample:
    return Stack(), (_x().requires_grad_(),), {}


class Checkpointed(Stack):
    """The user's own non-reentrant activation checkpoints around blocks."""

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@register
def checkpointed() -> Sample:
    return Checkpointed(), (_x(),), {}


class RandomPath(Stack):
    """Noise, dropout and a randomly dropped path, all drawn with torch."""

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            keep = (torch.rand(x.shape[0], 1) > 0.5).to(x.dtype)
            x = x + keep * block(F.dropout(x, 0.3, self.training)) + 0.01 * torch.randn_like(x)
        return self.head(x)


@register
def random_path() -> Sample:
    return RandomPath(), (_x(),), {}


class Experts(nn.Module):
    """A routed mixture with dense dispatch; every layer leaves a router loss behind in a list."""

    def __init__(self, losses: list[torch.Tensor]):
        super().__init__()
        self.losses = losses
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        top, index = weights.topk(2, -1)
        gates = torch.zeros_like(weights).scatter(-1, index, top)
        self.losses.append(weights.mean(0).square().sum())
        return x + sum(gates[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Experts(self.losses) for _ in range(2))

    def forward(self, x):
        self.losses.clear()
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x, torch.stack(self.losses).sum()


@register
def mixture_of_experts() -> Sample:
    return Mixture(), (_x(),), {}


@register
def weight_norm() -> Sample:
    model = Stack()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.fc)
    return model, (_x(),), {}


@register
def spectral_norm() -> Sample:
    model = Stack()
    for block in model.blocks:
        nn.utils.parametrizations.spectral_norm(block.fc)
    return model, (_x(),), {}
