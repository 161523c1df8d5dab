"""The optimizers of a run as one object, with their work and state divided over the ranks.

Every rank holds all parameters. In a step, gradients are summed and divided (reduce-scatter), each rank updates the
share that it owns, and the new parameters are collected (all-gather). This is ZeRO's second stage (Rajbhandari et al.
2019, arXiv 1910.02054). Muon gets whole matrices, as in modded-nanogpt. The parameters of one optimizer are sent while
the next one computes.

With one rank, nothing is divided: the optimizers work on the parameters themselves.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from optim.schedule import set_lr


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that one optimizer updates; `make` constructs the optimizer.

    units: views a parameter as (n, *unit). A unit, such as a matrix, always stays on one rank.
    lr_scale: returns the factor that the optimizer applies to the learning rate of a parameter.
    """

    params: list[nn.Parameter]
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    peak_lr: float
    units: Callable[[Tensor], Tensor] = torch.flatten
    lr_scale: Callable[[Tensor], float] | None = None


class Bucket:
    """Parameters of one group with units of one shape, which are sent together, and `shard`, this rank's share of them.

    With one rank, a bucket is one parameter and its own shard, and nothing is sent.
    """

    def __init__(self, group: Group, params: list[nn.Parameter], rank: int, world_size: int):
        self.params, self.units_of, self.divided = params, group.units, world_size > 1
        views = [group.units(p.detach()) for p in params]
        self.unit, self.counts = views[0].shape[1:], [len(view) for view in views]
        self.share = -(-sum(self.counts) // world_size)  # units a rank; the last ranks may own padding
        self.units = self.share * world_size
        self.mine = slice(rank * self.share, (rank + 1) * self.share)
        self.shard = params[0]
        if self.divided:
            self.shard = nn.Parameter(self.take_share([p.detach() for p in params]).clone())
            if group.lr_scale:
                scales = [p.new_full(p.shape, group.lr_scale(p)) for p in params]
                self.shard.lr_scale = self.take_share(scales)[:, :1, :1].clone()

    def take_share(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's share of tensors that have the shapes of the parameters."""
        return self.pack(tensors)[self.mine] if self.divided else tensors[0]

    def pack(self, tensors: list[Tensor]) -> Tensor:
        """Return tensors with the shapes of the parameters as (units, *unit), as a view if possible."""
        parts = [self.units_of(t) for t in tensors]
        if padding := self.units - sum(self.counts):
            parts.append(parts[0].new_zeros(padding, *self.unit))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def unpack(self, full: Tensor, tensors: list[Tensor]):
        """Copy (units, *unit) into tensors that have the shapes of the parameters."""
        torch._foreach_copy_([self.units_of(t) for t in tensors], full[: sum(self.counts)].split(self.counts))

    def reduce_gradients(self):
        """Sum the gradients over the ranks, and keep this rank's share of the sum."""
        full = self.pack([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        if full.is_cuda:
            dist.reduce_scatter_tensor(self.shard.grad, full)
        else:  # gloo's reduce-scatter is half as fast on CPUs, so we use all-to-all and a sum (results/speed/cpu.md)
            shares = torch.empty_like(full)
            dist.all_to_all_single(shares, full)
            torch.sum(shares.unflatten(0, (-1, self.share)), dim=0, out=self.shard.grad)

    def start_gathering(self):
        full = self.units_of(self.params[0].detach())
        if len(self.params) > 1 or len(full) < self.units or not full.is_contiguous():
            full = self.shard.new_empty(self.units, *self.unit)  # else straight into the parameter
        self.gathering = full, dist.all_gather_into_tensor(full, self.shard.detach(), async_op=True)

    def finish_gathering(self):
        full, work = self.gathering
        work.wait()
        self.unpack(full, [p.detach() for p in self.params])

    def gather(self, share: Tensor) -> list[Tensor]:
        """Collect a tensor from the ranks' shares; return it as tensors with the shapes of the parameters.

        A single number, such as Adam's count of steps, is returned once for each parameter.
        """
        if share.dim() == 0 or not self.divided:
            return [share] * len(self.params)
        full = share.new_empty(self.units, *self.unit)
        dist.all_gather_into_tensor(full, share.contiguous())
        tensors = [share.new_empty(p.shape) for p in self.params]
        self.unpack(full, tensors)
        return tensors


class Optimizers:
    """All optimizers of a run (the head of this file says how they divide their work). A step is:

        for each micro-batch: loss.backward()
        squared_norm = reduce_gradients()
        step(lr_factor, finite)

    skip: go on after a step that is not finite; otherwise nothing is updated from that step on.
    """

    def __init__(self, groups: dict[str, Group], rank: int = 0, world_size: int = 1, *, skip: bool = False):
        self.skip = skip
        self.groups = {name: group for name, group in groups.items() if group.params}
        self.buckets = {name: make_buckets(group, rank, world_size) for name, group in self.groups.items()}
        self.optimizers = {
            name: group.make([bucket.shard for bucket in self.buckets[name]]) for name, group in self.groups.items()
        }
        device = self.all_buckets()[0].shard.device
        self.found_inf = torch.zeros((), device=device)  # 1 once a step was not finite, unless `skip`

    def all_buckets(self) -> list[Bucket]:
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    def divided_buckets(self) -> list[Bucket]:
        """Return the buckets that are sent: all, or none with one rank."""
        return [bucket for bucket in self.all_buckets() if bucket.divided]

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """Sum and divide the gradients; return a number whose sum over the ranks is the squared norm of all of them."""
        for bucket in self.divided_buckets():
            bucket.reduce_gradients()
        gradients = [b.shard.grad for b in self.all_buckets() if b.shard.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).square()

    @torch.no_grad()
    def step(self, lr_factor: float, finite: Tensor) -> None:
        """Update all parameters, each with lr_factor times its peak learning rate, and drop the gradients.

        finite: a bool on the device. Where it is False parameters and state stay as they are; without `skip`, in all
        later steps too, as `found_inf` is 1 from then on.
        """
        masked = torch.maximum(self.found_inf, (~finite).float())
        if not self.skip:
            self.found_inf.copy_(masked)

        def matrices_last(name):  # Adam's parameters are sent while Muon computes
            return len(self.buckets[name][0].unit)

        for name in sorted(self.groups, key=matrices_last):
            optimizer = self.optimizers[name]
            set_lr(optimizer, self.groups[name].peak_lr * lr_factor)
            optimizer.found_inf = masked
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for bucket in self.buckets[name]:
                if bucket.divided:
                    bucket.start_gathering()
        for bucket in self.divided_buckets():
            bucket.finish_gathering()

    def learning_rates(self, lr_factor: float) -> dict[str, float]:
        return {name: group.peak_lr * lr_factor for name, group in self.groups.items()}

    def state_dict(self) -> dict:
        """Return the state of each parameter, whole: any number of processes can go on from it. All ranks call this."""
        result = {}
        for name, group in self.groups.items():
            state = {}
            for bucket in self.buckets[name]:
                for key, value in self.optimizers[name].state[bucket.shard].items():
                    for p, whole in zip(bucket.params, bucket.gather(value)):
                        state.setdefault(p, {})[key] = whole
            result[name] = {"state": {i: state[p] for i, p in enumerate(group.params) if p in state}}
        return result

    @torch.no_grad()
    def load_state_dict(self, result: dict) -> None:
        for name, group in self.groups.items():
            state = {p: result[name]["state"].get(i, {}) for i, p in enumerate(group.params)}
            for bucket in self.buckets[name]:
                ours = self.optimizers[name].state[bucket.shard]
                for key, value in state[bucket.params[0]].items():
                    if value.dim() > 0:
                        value = bucket.take_share([state[p][key].to(p.device) for p in bucket.params])
                    ours[key] = value.to(bucket.shard.device, copy=True)

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Take over the values of the parameters, after they were changed from outside."""
        for bucket in self.divided_buckets():
            bucket.shard.copy_(bucket.take_share([p.detach() for p in bucket.params]))


def make_buckets(group: Group, rank: int, world_size: int) -> list[Bucket]:
    """Return the buckets of a group: one for each shape of units, or each parameter on its own with one rank."""
    if world_size == 1:
        return [Bucket(group, [p], rank, world_size) for p in group.params]
    by_shape = defaultdict(list)
    for p in reversed(group.params):  # the order fixes the last bits of a norm
        by_shape[group.units(p.detach()).shape[1:], p.dtype].append(p)
    return [Bucket(group, params, rank, world_size) for params in by_shape.values()]
