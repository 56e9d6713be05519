"""A new adapter that is taken back if what is to train it fails before its first step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from regard.adapters.model import AdapterModel


@contextmanager
def new_adapter(adapters: AdapterModel, name: str) -> Iterator[None]:
    """Add an adapter; after an error before it was trained, leave all as it was, the router and the seeds too."""
    before = {key: value.detach().to("cpu", copy=True) for key, value in adapters.router.shared_tensors().items()}
    past_tasks, opened, added = dict(adapters.past_tasks), adapters.active_adapter, adapters.added
    parameters = adapters.pool.parameters_of(adapters.add_adapter(name))
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    except BaseException:
        if all(map(torch.equal, parameters, values)):
            adapters.delete_adapter(name)
            adapters.reseed(-1)
            adapters.added, adapters.past_tasks = added, past_tasks
            with torch.inference_mode(False), torch.no_grad():
                for key, value in adapters.router.shared_tensors().items():
                    value.copy_(before[key])
            if opened is not None:
                adapters.set_adapter(opened)
        raise
