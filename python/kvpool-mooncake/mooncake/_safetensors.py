"""Tensors from and to safetensors files, through the package safetensors."""

from __future__ import annotations

import importlib
from typing import Any

from mooncake import _codes
from mooncake._base import NOT_SET_UP, log
from mooncake._tensor_format import Tensor
from mooncake._tensors import TensorMethods


def _safetensors() -> Any:
    return importlib.import_module("safetensors.torch")


class SafetensorMethods(TensorMethods):
    """The safetensors methods of a store."""

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Writes the tensor of a key to a file (default: named like the key), under the key's name.

        Returns 0; -704 for a miss; -600 for a file that cannot be written, or without the package safetensors.
        """
        if not self._native.is_set_up():
            return self._refuse("save_tensor_to_safetensor", NOT_SET_UP)
        tensor = self._get_tensors([key])[0]
        if tensor is None:
            return _codes.NOT_FOUND
        name = key if file_name is None else file_name
        try:
            _safetensors().save_file({key: tensor}, name)
        except Exception as error:  # The package raises a class of its own that is no OSError.
            log.error("save_tensor_to_safetensor: %s: %s", name, error)
            return _codes.PARAMETERS
        return _codes.OK

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Tensor | None:
        """Puts a tensor of a file and returns it; `None` for an error.

        It takes the tensor with the name `key`, or without a key the first tensor of the file. It puts the
        tensor under `key`, or without a key under the file's name.
        """
        if not self._native.is_set_up():
            self._refuse("load_tensor_from_safetensor", NOT_SET_UP)
            return None
        try:
            tensors = _safetensors().load_file(file_name)
        except Exception as error:  # The package raises a class of its own that is no OSError.
            log.error("load_tensor_from_safetensor: %s: %s", file_name, error)
            return None
        if not tensors:
            log.error("load_tensor_from_safetensor: %s has no tensor", file_name)
            return None
        if key is not None and key not in tensors:
            log.warning("load_tensor_from_safetensor: %s has no %s; its first tensor is taken", file_name, key)
        tensor = tensors.get(key, next(iter(tensors.values())))
        code = self._one(self._put_tensors([file_name if key is None else key], [tensor], None, False))
        if code != _codes.OK:
            log.error("load_tensor_from_safetensor: the put returned %d", code)
            return None
        return tensor
