"""Rows that begin with the same scattered blocks, made from rows of decode attention's cases."""

from collections.abc import Sequence

import torch

from kernels.attention.cascade_config import CascadeConfig, cascade_config
from kernels.attention.cascade_groups import SharedPrefix, fill_cascade_arrays
from kernels.attention.cascade_reference import CascadePlan, PrefixGroups, empty_cascade_plan, prefix_groups
from kernels.attention.decode_config import DecodeConfig
from kernels.attention.device_family import family_of
from tests.kernels.decode_cases import BAD_BLOCK, SMALL, DecodeCase, decode_case

SMALL_CASCADE = CascadeConfig(
    rows=16, prefix=DecodeConfig(tile=16, num_warps=4, num_stages=3, programs_per_sm=1), suffix=SMALL
)


def shared_case(
    lengths: Sequence[int], prefixes: Sequence[SharedPrefix], *, block_size: int = 16, **options: object
) -> DecodeCase:
    """Rows of these contexts of which groups have their first blocks in common, as the case of decode attention that
    has the same results. What members had there of their own is poisoned, and past a row's context so is its table.
    """
    case = decode_case(lengths, block_size=block_size, **options)  # type: ignore[arg-type]
    tables = case.rows.block_tables
    for (first, *others), num_blocks in prefixes:
        shared = num_blocks * block_size
        assert num_blocks > 0 and all(lengths[row] >= shared for row in (first, *others))
        for row in others:
            own = tables[row, :num_blocks].long()
            case.key_cache[own] = case.value_cache[own] = torch.tensor(float("nan")).to(case.key_cache.dtype)
            tables[row, :num_blocks] = tables[first, :num_blocks]
            case.keys[row] = torch.cat((case.keys[first][:shared], case.keys[row][shared:]))
            case.values[row] = torch.cat((case.values[first][:shared], case.values[row][shared:]))
    assert (tables[0] != BAD_BLOCK).any()
    return case


def groups_of(prefixes: Sequence[SharedPrefix], num_rows: int, block_size: int, device: torch.device) -> PrefixGroups:
    arrays = fill_cascade_arrays(prefixes, num_rows, block_size)
    return prefix_groups({name: torch.from_numpy(array).to(device) for name, array in arrays.items()}, num_rows)


def empty_plan(
    case: DecodeCase,
    prefixes: Sequence[SharedPrefix],
    num_processors: int,
    config: CascadeConfig | None = SMALL_CASCADE,
) -> CascadePlan:
    """Make a plan without work, its results poisoned; `None` for the configuration that is launched."""
    device = case.query.device
    plan = empty_cascade_plan(
        case.rows,
        groups_of(prefixes, len(case.query), case.block_size, device),
        case.shape,
        config or cascade_config(case.shape, family_of(device)),
        case.block_size,
        num_processors,
    )
    plan.suffixes.partial_out.fill_(float("nan"))
    plan.suffixes.partial_lse.fill_(float("nan"))
    return plan


def refill(plan: CascadePlan, prefixes: Sequence[SharedPrefix]) -> None:
    """Other groups in the same memory, as a step's upload brings them."""
    rows, size = plan.suffixes.rows, plan.suffixes.block_size
    new = groups_of(prefixes, len(rows.context_lens), size, rows.context_lens.device)
    plan.groups.groups.copy_(new.groups)
    plan.groups.members.copy_(new.members)
    plan.groups.group_of_row.copy_(new.group_of_row)
