"""One warning of cuDNN's is silenced where models compute on CUDA, once."""

from __future__ import annotations

import warnings

import pytest

from megatrain.device.cuda import Cuda

TEXT = "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted"


def test_a_warning_that_users_can_do_nothing_about_is_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Cuda(0)
        warnings.warn(TEXT, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


def test_python_forgets_no_warning_that_it_has_shown():
    with warnings.catch_warnings():
        Cuda(0)
        before = list(warnings.filters)
        Cuda(0)
        assert warnings.filters == before
