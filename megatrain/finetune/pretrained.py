"""The model and the tokenizer of a fine-tuning: on paper first, then with their weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from megatrain.counts import counted
from megatrain.errors import MegatrainError, OptionError
from megatrain.finetune.fine_tuning import FineTuning


class ModelWanted(Protocol):
    """What a model on paper depends on; see `FineTuning`."""

    # Properties, as nobody sets them. FineTuning says what each is, so none has a docstring here (D102).

    @property
    def model(self) -> str: ...  # noqa: D102
    @property
    def from_config(self) -> bool: ...  # noqa: D102
    @property
    def lora(self) -> bool: ...  # noqa: D102
    @property
    def lora_rank(self) -> int: ...  # noqa: D102
    @property
    def alpha(self) -> float: ...  # noqa: D102
    @property
    def lora_dropout(self) -> float: ...  # noqa: D102
    @property
    def precision(self) -> str: ...  # noqa: D102


_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def read_config(tuning: ModelWanted) -> Any:
    """Reads the model's configuration.

    Raises:
        OptionError: If there is none, or it can't be read.
    """
    path = Path(tuning.model)
    if path.is_file() and not tuning.from_config:
        raise OptionError(
            f"`{path}` is a file, and a model is a folder.\n"
            "  A folder has config.json, the weights as safetensors, and the tokenizer.\n"
            "  Give the folder; or --from-config, to begin with random weights."
        )
    if path.is_dir() and not (path / _CONFIG).is_file():
        raise OptionError(
            f"the folder `{path}` has no {_CONFIG}.\n  A folder of a model is what save_pretrained() writes.\n"
            "  Check the path."
        )
    if path.is_dir() and not tuning.from_config and not any(path.glob("*.safetensors")):
        raise OptionError(
            f"the folder `{path}` has no weights.\n  Weights are read from safetensors.\n"
            "  Save them with save_pretrained(); or give --from-config, to begin with random weights."
        )
    with _readable(f"the configuration of `{path}`"):
        return AutoConfig.from_pretrained(tuning.model, **_source(tuning.model))


def read_tokenizer(tuning: FineTuning) -> Any:
    """Reads the tokenizer.

    Raises:
        OptionError: If there is none, or it can't be read.
    """
    name = tuning.tokenizer or tuning.model
    if Path(name).is_file():
        name = str(Path(name).parent)  # of a config.json
    with _readable(f"the tokenizer of `{name}`", "  Name a folder that has one with --tokenizer."):
        return AutoTokenizer.from_pretrained(name, **_source(name))


def positions_of(config: Any) -> int | None:
    """Returns how many positions a model has, the most tokens of a sequence; None if nothing says a number."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def longest(config: Any, asked: int | None, usual: int, flag: str) -> int:
    """Returns the most tokens of a sequence.

    Args:
        config: The model's.
        asked: What the user wants; None for the usual number, or fewer if the model has fewer positions.
        usual: See above.
        flag: The option of the command.

    Raises:
        OptionError: If more are asked for than the model has positions.
    """
    most = positions_of(config)
    if asked is None:
        return usual if most is None else min(usual, most)
    if most is not None and asked > most:
        raise OptionError(
            f"{flag} {asked} is longer than what the model takes: {most} tokens.\n"
            "  A model has `max_position_embeddings` positions, by its configuration.\n"
            f"  Give {flag} {most}, or less."
        )
    return asked


def model_on_paper(tuning: ModelWanted, config: Any) -> Any:
    """Makes the model without memory for its parameters; buffers that it computes are there.

    Raises:
        OptionError: If it isn't a causal language model that transformers knows.
    """
    with _readable(f"a language model of `{tuning.model}`"), init_empty_weights(include_buffers=False):
        return _adapted(AutoModelForCausalLM.from_config(config, dtype=_dtype(tuning)), tuning)


def read_model(tuning: FineTuning, config: Any) -> Any:
    """Makes the model with its weights, in host memory.

    Raises:
        OptionError: If the weights can't be read.
    """
    set_seed(tuning.seed)
    if tuning.from_config:
        return AutoModelForCausalLM.from_config(config, dtype=_dtype(tuning))
    with _readable(f"the weights of `{tuning.model}`"):
        options = {"config": config, "dtype": _dtype(tuning), "use_safetensors": True, **_source(tuning.model)}
        loaded: Any = AutoModelForCausalLM.from_pretrained(tuning.model, output_loading_info=True, **options)
        model, said = loaded
        _check_complete(tuning, said)
        return _adapted(model, tuning)


def check_ids(largest: int, model: Any) -> None:
    """Refuses token ids that the model has no embedding for.

    Raises:
        OptionError: With both numbers.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise OptionError(
            f"the tokenizer makes token id {largest}, and the model knows the ids below {known}.\n"
            "  Model and tokenizer belong together.\n  Give the model's own tokenizer with --tokenizer."
        )


def _dtype(tuning: ModelWanted) -> torch.dtype:
    # What isn't trained has no master, so it may be read in the dtype in which blocks compute. Trained weights begin
    # with all bits of the file; megatrain makes bf16 halves and the rest of them.
    return torch.bfloat16 if tuning.lora and tuning.precision == "bf16" else torch.float32


def _adapted(model: Any, tuning: ModelWanted) -> Any:
    if not tuning.lora:
        return model
    from peft import LoraConfig, get_peft_model

    adapters: Any = LoraConfig(
        r=tuning.lora_rank,
        lora_alpha=tuning.alpha,  # pyright: ignore[reportArgumentType]  # any number, by its use
        lora_dropout=tuning.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that will go
        return get_peft_model(model, adapters)


def _source(name: str) -> dict[str, Any]:
    """How transformers reads from there: a path never asks the network.

    Raises:
        OptionError: If it is neither a path that exists nor a name that the hub may know.
    """
    if Path(name).exists():
        return {"local_files_only": True}
    if _HUB_NAME.fullmatch(name) is None or name.startswith("."):
        raise OptionError(
            f"there is no folder `{name}`.\n  A model is a folder, or a name on the hub such as owner/model.\n"
            "  Check the path."
        )
    return {}


def _check_complete(tuning: FineTuning, said: Any) -> None:
    missing = sorted(said["missing_keys"])
    if missing:
        raise OptionError(
            f"the files of `{tuning.model}` lack {counted(len(missing), 'weight')} of the model: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.\n"
            "  Training would begin with random values there.\n  Give a folder with all weights of a language model."
        )


@contextmanager
def _readable(
    what: str, way: str = "  Check the path, and that the installed transformers knows this model."
) -> Generator[None]:
    """Turns what transformers raises for files that it can't use into an error of ours; other faults are its own."""
    try:
        yield
    except MegatrainError:
        raise
    except Exception as error:  # transformers, and a model's own code, raise anything for files that they can't use
        said = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(f"{what} can't be read: {said[:300]}\n  transformers reads it.\n{way}") from error
