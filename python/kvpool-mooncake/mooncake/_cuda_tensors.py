"""Reading tensors into the caller's own tensors, on a GPU or on the host."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake._base import LENGTHS_DIFFER
from mooncake._tensor_format import Tensor, header_of, is_lazy, torch_module
from mooncake._tensors import TensorMethods


class CudaTensorMethods(TensorMethods):
    """The `_into_cuda` methods of a store."""

    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Reads a stored tensor into a contiguous tensor of the same dtype and shape, on a GPU or the host.

        Returns the length of the data in bytes, or a code. The code is -600 for a stored tensor of another
        dtype or shape. The bytes of `tensor` are undefined after it.
        """
        return self._one(self.batch_get_tensor_into_cuda([key], [tensor]))

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence[Tensor]) -> list[int]:
        """`get_tensor_into_cuda` for several keys."""
        if len(keys) != len(tensors_list):
            return self._refused("batch_get_tensor_into_cuda", keys, LENGTHS_DIFFER)
        torch = torch_module()
        headers = []
        for key, tensor in zip(keys, tensors_list):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"a tensor must be a torch.Tensor, not {type(tensor).__name__}")
            fits = tensor.is_contiguous() and not is_lazy(tensor)
            if not fits:
                why = "the tensor to read into is not contiguous, or a lazy conjugate or negative"
                self._refuse_key("batch_get_tensor_into_cuda", key, why)
            headers.append(header_of(tensor) if fits else b"")
        # All pieces of a block are on one device. So the header is read into memory of the tensor's device.
        found = [
            torch.empty(max(len(header), 1), dtype=torch.uint8, device=tensor.device)
            for header, tensor in zip(headers, tensors_list)
        ]
        lengths = [tensor.numel() * tensor.element_size() for tensor in tensors_list]
        # A tensor that does not fit gets the address 0, which is refused. So its bytes stay unchanged.
        places = [
            [place.data_ptr() if header else 0, tensor.data_ptr()][: 2 if length else 1]
            for place, header, tensor, length in zip(found, headers, tensors_list, lengths)
        ]
        sizes = [[len(header), length][: len(place)] for header, length, place in zip(headers, lengths, places)]
        # Addresses follow only the default stream, so the call waits for torch's current stream.
        for device in {tensor.device for tensor in tensors_list if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        answers = self._native.get_into_many(keys, places, sizes)
        for at, (header, length) in enumerate(zip(headers, lengths)):
            if answers[at] < 0:
                continue
            if bytes(found[at].tolist()) != header or answers[at] != len(header) + length:
                why = "the stored tensor has another dtype or shape"
                answers[at] = self._refuse_key("batch_get_tensor_into_cuda", keys[at], why)
            else:
                answers[at] = length
        return self._all_said("batch_get_tensor_into_cuda", answers)
