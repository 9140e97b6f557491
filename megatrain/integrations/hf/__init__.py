"""Hugging Face trainers that stream: `Trainer`, and `Streamed` for any class derived from it (TRL's, yours)."""

from megatrain.integrations.hf.streamed import Streamed, Trainer

__all__ = ["Streamed", "Trainer"]
