"""Mutants of the passes, and of what they share: the editor, the layouts, the draws, capture."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, model, rule

__all__ = ["MUTANTS"]

_REPORT = "tests/show/test_report.py"
_OFFLOAD = "tests/passes/test_offload.py"
_MEMORY = "tests/passes/test_memory.py"
_MIXED = "tests/exact/test_mixing.py::test_exact"
_TRAFFIC = "tests/counts/test_traffic.py"
_PASSES = "tests/passes/test_passes.py"
_RANDOM = "tests/passes/test_random.py"
_SAME_DRAWS = f"{_RANDOM}::test_the_same_numbers_on_any_number_of_ranks"
_EDITS = "tests/properties/test_passes.py::test_any_wrong_edit_of_a_model_is_rejected"
_CHUNKED = "tests/exact/test_chunked_loss.py"
_FUNCTIONS = "tests/exact/test_functions.py"
_RULES = "tests/passes/test_rules.py::test_exact"


def _of(file: str, *rows: tuple[str, str, str, str, tuple[str, ...]]) -> tuple[Mutant, ...]:
    return tuple(Mutant(what, breaks, f"{file}.py", old, new, tests) for what, breaks, old, new, tests in rows)


MUTANTS: tuple[Mutant, ...] = (
    *_of(
        "passes/by_heads",
        (
            "parts in another order",
            "each value lies where it is read from",
            "before = before + width",
            "before = before",
            (f"{_MEMORY}::test_joined_by_pads",),
        ),
        (
            "repeated before joined",
            "what several ranks are sent alike is joined once, and one kernel writes all that is sent",
            "counts = {cp // want.kv_heads if want.evenly(cp) is not None else 1 for want in shared}",
            "counts = {1}",
            ("tests/counts/test_kernels.py::test_layout_copies_exchanges_and_what_runs_under_them[8-True]",),
        ),
        (
            "rows of other ranks",
            "pads of the rows are dropped where they become whole",
            "rows = edit.call(aten.slice.Tensor, rows, 0, edit.size(axis.start), edit.size(axis.start + axis.size))",
            "rows = edit.call(aten.slice.Tensor, rows, 0, 1, edit.size(1 + axis.size))",
            (f"{_MEMORY}::test_exact[options2-sizes2]",),
        ),
        (
            "heads between the rows",
            "what arrives from each rank is its own heads",
            "merged = edit.call(aten.permute.default, rows, [*range(2, dim + 2), 1, 0, dim + 2, dim + 3])",
            "merged = edit.call(aten.permute.default, rows, [*range(2, dim + 2), 1, dim + 2, 0, dim + 3])",
            (f"{_MEMORY}::test_exact[options0-sizes0]",),
        ),
    ),
    *_of(
        "passes/pack",
        (
            "packed without a gradient",
            "what is computed without a gradient does not travel with what has one",
            "and modes[a.value] == modes[b.value]",
            "",
            (f"{_MEMORY}::test_what_travels_together[changes3-2-96]",),
        ),
        (
            "exchanged twice",
            "what another attention reads too is exchanged once for both",
            "travel = found.setdefault((value, want), _Travel(value, want))",
            "travel = found.setdefault((value, node), _Travel(value, want))",
            (f"{_MEMORY}::test_what_travels_together[changes2-2-128]",),
        ),
        (
            "cast before it travels",
            "what is cast to a wider dtype travels as it was",
            "if len({travel.dtype for travel in narrow}) == 1:",
            "if False:",
            (f"{_MEMORY}::test_what_travels_together[changes8-1-64]",),
        ),
        (
            "added narrower",
            "gradients of a head that several ranks hold are added as wide as they are made",
            "isinstance(travel.want, Sharded) and len({modes",
            "len({modes",
            (f"{_MEMORY}::test_what_travels_together[changes9-2-64]",),
        ),
        (
            "repeats that cannot wait",
            "a value that is repeated early travels with those that come later",
            "behind = [user if not _waits(user, modes) else _needed(list(user.users), modes) for user in users]",
            "behind = users",
            (f"{_MEMORY}::test_what_travels_together[changes6-1-64]",),
        ),
        (
            "repeats with another gradient",
            "what is repeated without a gradient stays so",
            "bool(behind) and all(mode == modes[node] for mode in behind)",
            "bool(behind)",
            (f"{_MEMORY}::test_what_travels_together[changes7-2-64]",),
        ),
        (
            "before it is computed",
            "nothing is needed before the last of what travels with it",
            "and _last(together) < _needed(users, modes):",
            "and True:",
            (f"{_MEMORY}::test_what_travels_together[changes2-2-128]",),
        ),
        (
            "always packed",
            "where launches cost less than what could be hidden, exchanges start one by one",
            "return seconds < (len(group) - 1) * _LAUNCH",
            "return True",
            (f"{_TRAFFIC}::test_a_query_on_its_way_for_long_is_exchanged_alone",),
        ),
    ),
    *_of(
        "passes/hoist_slices",
        (
            "whole tables",
            "rotary tables are computed for a rank's own rows",
            "if placement is not None:",
            "if False:",
            (f"{_TRAFFIC}::test_no_rank_holds_anything_whole_but_integers",),
        ),
    ),
    *_of(
        "passes/recompute",
        (
            "attention runs again",
            "what attention gives is kept",
            'keep = keep or (policy == "attention" and is_attention(node.target)) or',
            "keep = keep or",
            (f"{_MEMORY}::test_what_a_layer_keeps",),
        ),
        (
            "the last layer runs again",
            "what is read behind the layers is kept",
            "return any(user.op == \"call_function\" and user not in regions for user in node.users)",
            "return False",
            (f"{_MEMORY}::test_nothing_of_the_last_layer_runs_again_for_what_is_behind_it",),
        ),
    ),
    *_of(
        "passes/tile_mlp",
        (
            "kept in chunks",
            "what is wide in a block is computed again",
            'copy.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)',
            "pass",
            (f"{_MEMORY}::test_chunks_keep_nothing_wide",),
        ),
        (
            "narrow blocks in chunks",
            "a block is wider in between than at its end",
            "each > width for each in widths",
            "each > 0 for each in widths",
            (f"{_MEMORY}::test_a_model_without_feed_forward_blocks_has_no_chunks",),
        ),
    ),
    *_of(
        "cp_compile/schedule",
        (
            "nothing is hidden",
            "a weight gradient runs while an exchange is on its way",
            "order.insert(order.index(exchange) + 1, chosen)",
            "order.append(chosen)",
            ("tests/counts/test_kernels.py::test_layout_copies_exchanges_and_what_runs_under_them[2-True]",),
        ),
    ),
    *_of(
        "passes/region",
        (
            "another region's body",
            "a region is another one on operands of another form",
            """f"{self._name}: {', '.join(forms)}\"""",
            "self._name",
            (f"{_CHUNKED}::test_two_losses_in_one_graph",),
        ),
    ),
    *_of(
        "cp_compile/accumulate",
        (
            "a turned product as it is",
            "the transpose of a product is that of its factors, in the other order",
            "        turned ^= order_of(product) == [1, 0]\n",
            "        turned = False\n",
            ("tests/passes/test_accumulate.py::test_sums_of_products",),
        ),
    ),
    *_of(
        "cp_compile/_compat",
        (
            "sizes last",
            "what comes back is what was sent, where sizes are kept too",
            'kept = sorted(results[outputs:], key=lambda value: isinstance(value.meta["val"], torch.Tensor))',
            "kept = results[outputs:]",
            ("tests/passes/test_offload.py::test_sizes_that_the_backward_is_handed_first",),
        ),
    ),
    *_of(
        "cp_compile/show/kernels",
        (
            "a loop for each value",
            "what inductor computes in one loop is there at once",
            "if same(loop.elements, elements) and self._share(loop, operands) and not self._wait(loop, operands):",
            "if False:",
            (f"{_REPORT}::test_the_peak_is_what_a_step_holds[computed again]",),
        ),
        (
            "written over what others read",
            "an operand that another result of the loop reads is not written over",
            "loop.reads(x) == [result] and same(sizes[x], sizes[result])",
            "same(sizes[x], sizes[result])",
            (f"{_REPORT}::test_the_peak_is_what_a_step_holds[computed again]",),
        ),
        (
            "a loop through both halves",
            "forward and backward are computed by kernels of their own",
            "self._first = len(self.loops)",
            "pass",
            ("tests/show/test_kernels.py::test_none_of_another_graph_and_none_alone",),
        ),
        (
            "loops in a circle",
            "what waits for a loop runs behind it",
            "return any(self._behind.get(x, 0) & loop.mask for x in operands if x not in loop.results)",
            "return False",
            ("tests/show/test_kernels.py::test_none_that_waits_for_what_is_made_of_the_loop",),
        ),
    ),
    *_of(
        "cp_compile/backend",
        (
            "buffers wait to be reused",
            "what is computed again leaves the memory free",
            'patches["allow_buffer_reuse"] = False',
            'patches["allow_buffer_reuse"] = True',
            (f"{_REPORT}::test_the_peak_is_what_a_step_holds[computed again]",),
        ),
    ),
    *_of(
        "cp_compile/show/memory",
        (
            "the host is the device",
            "what waits on the host is not held by the device",
            'storages = [storage for storage in self.storages if storage.kind != "host"]',
            "storages = list(self.storages)",
            ("tests/passes/test_offload.py::test_reported_and_planned",),
        ),
    ),
    *_of(
        "cp_compile/offload",
        (
            "back when it is needed",
            "a layer comes back while the one behind it runs",
            "        start = first\n",
            "        start = None\n",
            (f"{_OFFLOAD}::test_a_layer_comes_back_while_the_one_behind_it_runs",),
        ),
        (
            "no views",
            "what is a view of a value is one again behind its way back",
            "user.replace_input_with(kept.source, result)",
            "user.replace_input_with(kept.source, back[kept.value])",
            (f"{_OFFLOAD}::test_views_of_a_part_are_replayed_behind_the_way_back",),
        ),
        (
            "each view by itself",
            "views of one value travel once",
            "        if kept.value not in sent:\n",
            "        if True:\n",
            (f"{_OFFLOAD}::test_all_that_is_kept_waits_on_the_host[default]",),
        ),
    ),
    *_of(
        "passes/chunk_loss",
        (
            "pads count",
            "the rows of pads add nothing to a loss in chunks",
            'target = edit.call(aten.where.ScalarOther, head.mask, arguments["target"], arguments["ignore_index"])',
            'target = arguments["target"]',
            (f"{_CHUNKED}::test_exact[flat-13]",),
        ),
        (
            "logits that something else reads",
            "a loss is chunked only where nothing else needs the logits",
            "            else:\n                raise _UnknownError(f",
            "            elif False:\n                raise _UnknownError(f",
            (f"{_CHUNKED}::test_left_alone_or_refused",),
        ),
    ),
    *_of(
        "passes/chunked_cross_entropy",
        (
            "the loss's own gradient",
            "the kept gradient is multiplied by the one that comes in",
            "of_hidden * gradient, 0)",
            "of_hidden, 0)",
            (f"{_CHUNKED}::test_exact[flat-13]",),
        ),
        (
            "no logit of the target",
            "the gradient of a row is softmax but for its target",
            "torch.where(hit, softmax - 1, softmax)",
            "torch.where(hit, softmax, softmax)",
            (f"{_CHUNKED}::test_exact[flat-13]",),
        ),
    ),
    *_of(
        "passes/outputs",
        (
            "partial sums as outputs",
            "a sum that comes back is that of all ranks",
            'context.options.outputs == "gathered":\n            wants.append(WHOLE)',
            'context.options.outputs == "gathered":\n            wants.append(layout)',
            model("no pads"),
        ),
        (
            "windows as outputs",
            "rows that come back are torch's own chunks",
            "axis = Axis.cut(layout.axis.size, context.cp_size, layout.axis.name)",
            "axis = layout.axis",
            ("tests/properties/test_found.py::test_a_sliced_output",),
        ),
        (
            "a cache comes back",
            "keys and values among the outputs are refused",
            'if isinstance(node.meta["cp_shown"][0], Sharded):',
            "if False:",
            ("tests/zoo/test_users.py::test_a_cache_among_the_outputs_is_refused[Llama]",),
        ),
    ),
    *_of(
        "passes/masks",
        (
            "windows are causal",
            "only j <= i is causal",
            "elif mask.holds == _causal(mask) and",
            "elif mask.holds is not None and",
            ("tests/passes/test_masks.py::test_other_masks_stay",),
        ),
        (
            "under causal already",
            "a mask under is_causal is not read as causal alone",
            "_replace_mask(node, is_causal=arguments[\"is_causal\"])",
            "_replace_mask(node, is_causal=True)",
            ("tests/passes/test_masks.py::test_causal_and_full_masks_are_named",),
        ),
    ),
    *_of(
        "passes/positions/logic",
        (
            "less is at most",
            "integers that are less are less by one",
            '("lt.Tensor lt.Scalar", _compared(lambda a, b: [b - a - 1]))',
            '("lt.Tensor lt.Scalar", _compared(lambda a, b: [b - a]))',
            ("tests/passes/test_masks.py::test_the_form_of_a_value_is_the_value[lt]",),
        ),
    ),
    *_of(
        "passes/positions/forms",
        (
            "numbers without end",
            "an integer that wraps has no form",
            "if not most.is_number or most > torch.iinfo(dtype).max:",
            "if False:",
            ("tests/passes/test_masks.py::test_what_is_not_affine_has_no_form[wraps]",),
        ),
        (
            "true somewhere",
            "a condition is dropped where it holds at every index",
            "if known_true(fake_mode, sympy.Ge(low, 0)):",
            "if known_true(fake_mode, sympy.Ge(high, 0)):",
            ("tests/passes/test_masks.py::test_the_form_of_a_value_is_the_value[window]",),
        ),
        (
            "pieces by their first row",
            "pieces of several rows are told apart",
            "one_row = same(start - before_start, 1)",
            "one_row = True",
            ("tests/passes/test_masks.py::test_the_form_of_a_value_is_the_value[joined, alike at first]",),
        ),
    ),
    *_of(
        "passes/positions/views",
        (
            "from outside",
            "an index that is looked up lies inside",
            "if not all(known_true(a.fake_mode, each) for each in inside):",
            "if False:",
            ("tests/passes/test_masks.py::test_what_is_not_affine_has_no_form[outside, from the end]",),
        ),
    ),
    *_of(
        "passes/repeats",
        (
            "repeats of any order",
            "heads are repeated one by one, and not all of them in turn",
            " or not all(same(a, b) for a, b in zip(out, merged))",
            "",
            ("tests/passes/test_repeats.py::test_not_a_repeat_of_heads",),
        ),
        (
            "grouped with a gradient",
            "a repeat under no_grad stops the gradient of what is repeated",
            "if len({modes[node] for node in (attention, key, value)}) > 1:",
            "if False:",
            ("tests/passes/test_repeats.py::test_a_repeat_without_a_gradient_stops_it[nothing-True]",),
        ),
        (
            "moved to another gradient",
            "a repeat under no_grad is not moved behind what has a gradient",
            "if any(modes[source] != modes[node] for source in operands if source in known):",
            "if False:",
            ("tests/passes/test_repeats.py::test_a_repeat_without_a_gradient_stops_it[a product-True]",),
        ),
        (
            "a part of a repeat",
            "a repeat of which a part runs under no_grad stays as it is",
            "if modes[step] != mode:",
            "if False:",
            ("tests/passes/test_repeats.py::test_a_repeat_without_a_gradient_stops_it[nothing-False]",),
        ),
        (
            "moved behind everything",
            "a repeat stays in front of what mixes heads",
            "if moved or placement.deliver or placement.local is not None:",
            "if False:",
            ("tests/passes/test_repeats.py::test_not_moved_behind_what_does",),
        ),
    ),
    *_of(
        "passes/hoist",
        (
            "one use decides for all",
            "heads that another use wants as they were stay so",
            "if len(wanted) != 1 or",
            "if len(wanted) == 0 or",
            ("tests/passes/test_repeats.py::test_heads_that_are_used_elsewhere_too[True-8]",),
        ),
        (
            "turned where it is whole",
            "a key that is turned by hand travels with the query",
            "if node.target in TURNS:",
            "if False:",
            (f"{_MEMORY}::test_what_travels_together[changes5-1-64]",),
        ),
    ),
    *_of(
        "passes/rules/attention",
        (
            "few heads are cut",
            "ranks are given the heads that their queries use",
            "if kv_heads % cp_size == 0:",
            "if kv_heads > 1:",
            ("tests/passes/test_repeats.py::test_exact_and_no_more_than_is_needed[2-expand-False]",),
        ),
    ),
    *_of(
        "passes/place",
        (
            "run whole without a rule",
            "an op without a rule is refused",
            '        raise NoRule(f"{op.name} has no rule for a value whose',
            '        return _whole(node, operands)\n        raise NoRule(f"{op.name} has no rule for a value whose',
            ("tests/test_verify.py::test_a_refusal_comes_through",),
        ),
        (
            "gathers without leave",
            "a gather takes the user's leave, or the rule's",
            'gather = context.options.fallback == "gather" or',
            "gather = True or",
            ("tests/properties/test_found.py::test_what_no_rule_gathers_is_refused",),
        ),
        (
            "layouts of any size",
            "a cut dim is as long as its layout says",
            "if size is not None and not equal(",
            "if False and not equal(",
            ("tests/passes/test_experts.py::test_other_numbers_of_rows_are_refused_or_exact",),
        ),
        (
            "an update of this rank",
            "an input is not written with a cut value",
            "    if node.target is aten.copy_.default:\n",
            "    if False:\n",
            ("tests/test_refusals.py::test_a_buffer_that_differs_by_rank",),
        ),
        (
            "draws without a number",
            "each draw has its own numbers",
            'node.meta["cp_draw"] = number = number + 1',
            'node.meta["cp_draw"] = number = 1',
            (f"{_RANDOM}::test_draws_do_not_depend_on_each_other",),
        ),
    ),
    *_of(
        "passes/sequence",
        (
            "attention alone",
            "a model without attention has the sequence that its scans mix",
            "if without_attention and",
            "if False and",
            ("tests/zoo/test_models.py::test_exact[Mamba-2-plain-29-4]",),
        ),
        (
            "the first of several",
            "several inputs with sequences of their own are refused",
            "    if len(groups) > 1:\n",
            "    if False:\n",
            (f"{_PASSES}::test_several_sequences_are_refused_and_one_can_be_named",),
        ),
        (
            "dims from the front alone",
            "a dim may be named from behind",
            "if dim in (candidate.layout.dim, candidate.negative_dim)]",
            "if dim == candidate.layout.dim]",
            ("tests/properties/test_found.py::test_a_sequence_that_is_named_from_behind",),
        ),
    ),
    *_of(
        "passes/moves",
        (
            "partial sums are sliced",
            "a partial sum is made before it is cut",
            '(Partial, Sharded): ("reduce", WHOLE),',
            '(Partial, Sharded): ("slice", want),',
            (*rule("add.Tensor"), f"{_PASSES}::test_the_table_of_moves"),
        ),
        (
            "windows are not aligned",
            "two windows of one axis have other rows",
            "    if have == want:\n        return None\n",
            "    if have == want or str(have) == str(want):\n        return None\n",
            ("tests/passes/test_mixing.py",),
        ),
        (
            "moved in front of the value",
            "a move stands behind its value",
            "                        made[key] = _sent(edit, build, source, have, step[1])\n",
            "                        made[key] = source\n",
            model("pads"),
        ),
    ),
    *_of(
        "passes/bind_rank",
        (
            "bound twice",
            "a second run of a pass changes nothing",
            '    if any(node.meta.get("cp_rank") for node in inputs):\n',
            "    if False:\n",
            (f"{_PASSES}::test_idempotent", *model("no pads")),
        ),
    ),
    *_of(
        "passes/bind_seed",
        (
            "behind the rank",
            "the rank is the last input",
            "inserting_before(rank)",
            "inserting_after(rank)",
            (f"{_SAME_DRAWS}[dropout]",),
        ),
    ),
    *_of(
        "passes/reduction",
        (
            "not summed",
            "a loss is that of all ranks",
            "    return edit.all_reduce(value)\n",
            "    return value\n",
            model("no pads"),
        ),
        (
            "the largest share",
            "a partial value is summed",
            "    return edit.all_reduce(value)\n",
            '    return edit.all_reduce(value, "max")\n',
            model("no pads"),
        ),
    ),
    *_of(
        "passes/gather",
        (
            "pads gathered",
            "pads are dropped from a gathered value",
            "    if axis.has_pads(cp):\n",
            "    if False:\n",
            model("gathered"),
        ),
        (
            "rows of each rank in turn",
            "the order of gathered rows",
            "order = [dim + 1, *(d for d in range(len(split)) if d != dim + 1)]",
            "order = list(range(len(split)))",
            model("gathered"),
        ),
    ),
    *_of(
        "passes/exchange",
        (
            "no all-to-all",
            "heads are traded for the sequence",
            "    value = edit.all_to_all(value)\n",
            "    value = edit.call(aten.clone.default, edit.call(aten.contiguous.default, value))\n",
            (_MIXED,),
        ),
        (
            "heads dealt in turn",
            "which rank gets which heads",
            "            split += [cp, want.axis.chunk]\n",
            "            send += 1\n            split += [want.axis.chunk, cp]\n",
            (_MIXED,),
        ),
        (
            "no transpose behind",
            "the rows of the ranks in order",
            "    back = [*range(1, place), 0, *range(place, len(split))]\n",
            "    back = list(range(len(split)))\n",
            (_MIXED,),
        ),
        (
            "pads attended",
            "pads are dropped where the axis is whole",
            "def _drop_pads(edit: Editor, value: Node, shape: tuple[Size, ...], have: Sharded) -> Node:\n"
            "    cp, axis, dim = edit.context.cp_size, have.axis, have.dim\n    if not axis.has_pads(cp):\n",
            "def _drop_pads(edit: Editor, value: Node, shape: tuple[Size, ...], have: Sharded) -> Node:\n"
            "    cp, axis, dim = edit.context.cp_size, have.axis, have.dim\n    if True:\n",
            (_MIXED,),
        ),
        (
            "not padded",
            "an axis that is cut is padded first",
            "    rows = edit.all_rows(axis)\n",
            "    rows = edit.call(aten.arange.default, edit.size(axis.size), device=edit.device)\n",
            (_MIXED,),
        ),
        (
            "every kv head to each",
            "which kv heads a rank is sent",
            "heads_of_all_ranks(edit, want))",
            "edit.call(aten.remainder.Scalar, heads_of_all_ranks(edit, want), want.count))",
            ("tests/passes/test_repeats.py::test_few_heads_whose_rows_are_last",),
        ),
        (
            "pads dropped in front",
            "which rows are pads",
            "start, end = edit.size(axis.start), edit.size(axis.start + axis.size)",
            "start, end = edit.size(axis.start + cp * axis.chunk - axis.size), edit.size(axis.start + cp * axis.chunk)",
            (_MIXED,),
        ),
    ),
    *_of(
        "passes/heads",
        (
            "the first head of each",
            "which kv heads a rank uses",
            "edit.call(aten.mul.Scalar, rank, share), group)",
            "edit.call(aten.mul.Scalar, rank, 0), group)",
            model("grouped heads"),
        ),
        (
            "a query's place on its rank",
            "which kv head a query uses",
            "    return edit.once((\"head_of_query\"",
            "    group = 1\n    return edit.once((\"head_of_query\"",
            model("grouped heads"),
        ),
        (
            "kv heads of the first rank",
            "which of the whole kv heads a rank takes",
            "heads = edit.call(aten.add.Tensor, _first(edit, kv, edit.rank), _arange(edit, kv.count))",
            "heads = _arange(edit, kv.count)",
            (f"{_RULES}[sdpa, whole mqa]", "tests/properties/test_found.py::test_whole_kv_heads"),
        ),
    ),
    *_of(
        "passes/slicing",
        (
            "the first rows for each",
            "which rows of a whole value a rank takes",
            "    rows = edit.rows(want.axis)\n",
            "    rows = edit.call(aten.arange.default, edit.size(want.axis.chunk), device=edit.device)\n"
            "    rows = edit.call(aten.clamp.default, rows, 0, edit.size(want.axis.size - 1))\n",
            model("no pads"),
        ),
        (
            "the axis in front of the rest",
            "a slice of a flattened dim",
            "    value = edit.call(aten.index_select.default, value, want.dim + 1, rows)\n",
            "    value = edit.call(aten.flip.default, value, [want.dim])\n"
            "    value = edit.call(aten.index_select.default, value, want.dim + 1, rows)\n",
            ("tests/properties/test_found.py::test_a_whole_value_beside_flattened_rows",),
        ),
    ),
    *_of(
        "passes/localise",
        (
            "views as they were",
            "an op that names sizes names those of a rank",
            "        if form is None:\n            continue\n",
            "        if form is None or node.target in _REPLACED:\n            continue\n".replace(
                "_REPLACED", "(torch.ops.aten.reshape.default, *_VIEWS)"
            ),
            model("no pads"),
        ),
        (
            "every piece is the first",
            "which piece is which",
            "local[user.args[1]])",
            "local[0])",
            rule("split.Tensor"),
        ),
    ),
    *_of(
        "passes/return_sizes",
        (
            "every size is the first",
            "which run-time size an output has",
            "size_index=list(extra).index(output.size))",
            "size_index=0)",
            ("tests/test_verify.py", "tests/properties/test_found.py::test_two_symbolic_sizes"),
        ),
    ),
    *_of(
        "passes/overlap",
        (
            "waits leave their grad mode",
            "a node stays in the grad mode that it was written in",
            " and grad_mode[first] == grad_mode[wait]:",
            ":",
            (f"{_PASSES}::test_waits_do_not_leave_their_grad_mode",),
        ),
        (
            "waits stay",
            "exchanges that are started one after another run together",
            "                first.prepend(node)\n",
            "                pass\n",
            (f"{_PASSES}::test_waits_sink_behind_all_starts",),
        ),
    ),
    *_of(
        "passes/check",
        (
            "no look at waits",
            "every collective is waited on",
            "if node.target in COLLECTIVES and not any(",
            "if False and not any(",
            (f"{_EDITS}[missing_waits]",),
        ),
        (
            "no look at edges",
            "every edge carries the layout that is asked for",
            "            if step is not None and step[0] in finished:\n",
            "            if False:\n",
            (f"{_EDITS}[dropped_exchanges]", f"{_EDITS}[swapped_layouts]"),
        ),
        (
            "no look at shapes",
            "every value has the local shape of its layout",
            "            if len(shape) != len(expected[node]) or not all(agree):\n",
            "            if False:\n",
            ("tests/properties/test_found.py::test_a_wrong_shape_is_seen",),
        ),
        (
            "no look at dtypes",
            "every value has the dtype that it has in the program",
            '            if value.dtype != node.meta["val"].dtype:\n',
            "            if False:\n",
            ("tests/properties/test_found.py::test_a_wrong_dtype_is_seen",),
        ),
        (
            "no look at attention",
            "no attention sees a slice of its keys",
            "        if is_attention(node.target):\n",
            "        if False:\n",
            ("tests/properties/test_found.py::test_keys_that_are_cut_are_seen",),
        ),
    ),
    *_of(
        "passes/pipeline",
        (
            "any order",
            "the order of the passes is checked before they run",
            "        if missing:\n",
            "        if False:\n",
            (f"{_PASSES}::test_the_order_of_the_pipeline_is_checked_before_it_runs",),
        ),
        (
            "no gather",
            "what the user lets be gathered is gathered",
            "    PassStep(gather, ",
            "    PassStep(lambda module, context: module, ",
            model("gathered"),
        ),
    ),
    *_of(
        "passes/editor",
        (
            "positions local",
            "a row's place in the whole",
            "rows = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, self.rank, chunk), offset)",
            "rows = offset",
            model("no pads"),
        ),
        (
            "pads are real",
            "which rows are pads",
            "                self.call(aten.lt.Scalar, rows, self.size(layout.axis.size)),\n",
            "                self.call(aten.ge.Scalar, rows, 0),\n",
            (*rule("sum.dim_IntList"), *model("pads")),
        ),
        (
            "rows in front are real",
            "which rows of a window are pads",
            "                self.call(aten.ge.Scalar, rows, 0),\n",
            "                self.call(aten.ge.Scalar, rows, -9),\n",
            rule("sum.dim_IntList"),
        ),
        (
            "windows start at 0",
            "where a window starts",
            "return rows if same(axis.start, 0) else self.call(aten.sub.Tensor, rows, self.size(axis.start))",
            "return rows",
            rule("sum.dim_IntList"),
        ),
        (
            "elements of a flattened dim",
            "which elements of a flattened dim are pads",
            "real = self.call(aten.reshape.default, real, [1, -1, 1])",
            "real = self.call(aten.reshape.default, real, [-1, 1, 1]) if layout.outer == layout.axis.chunk else "
            "self.call(aten.ones_like.default, self.call(aten.reshape.default, real, [1, -1, 1]))",
            rule("sum.dim_IntList", "mean.dim"),
        ),
        (
            "recomputed exchanges",
            "an exchange in a checkpointed region is kept",
            'node.meta["recompute"] = CheckpointPolicy.MUST_SAVE',
            "pass",
            (f"{_PASSES}::test_exchanges_in_a_checkpointed_region_are_saved",),
        ),
        (
            "flags sent as numbers",
            "what is sent has the fewest bytes",
            "elif val.dtype in (_NOT_ADDED if added else _NOT_SENT):",
            "elif val.dtype in _NOT_ADDED:",
            (f"{_PASSES}::test_flags_are_sent_as_bytes",),
        ),
        (
            "flags added as flags",
            "a sum of bools is made in int32",
            "elif val.dtype in (_NOT_ADDED if added else _NOT_SENT):",
            "elif val.dtype in _NOT_SENT:",
            (f"{_PASSES}::test_flags_are_sent_as_bytes",),
        ),
        (
            "all_reduce of a rank",
            "what a local form sums over the ranks",
            "        value = self.call(_c10d.all_reduce.default, value, op, self.context.group_name)\n"
            "        return self.call(_c10d.wait_tensor.default, value)\n",
            "        return self.call(aten.clone.default, value)\n",
            model("no pads"),
        ),
    ),
    *_of(
        "passes/layouts",
        (
            "chunks rounded down",
            "every row is on some rank",
            "        return -(-a // b)\n",
            "        return max(a // b, 1)\n",
            model("pads"),
        ),
        (
            "no pads anywhere",
            "whether a rank holds pads",
            "return not (same(self.start, 0) and same(self.size, cp_size * self.chunk))",
            "return False",
            model("pads"),
        ),
        (
            "carried by the batch",
            "the dim that the ranks divide carries a cut",
            "return not known, known and size % cp_size != 0, not 0 < dim == mixed - 1, -size if known else 0",
            "return not known, False, False, dim",
            (f"{_PASSES}::test_what_carries_a_cut",),
        ),
        (
            "a product divided in part",
            "a symbolic size is followed through views",
            "        expression = expression.replace(FloorDiv, lambda a, b: divide(a, b) or FloorDiv(a, b))\n",
            "        pass\n",
            ("tests/properties/test_found.py::test_a_view_where_batch_and_length_are_one_symbol",),
        ),
    ),
    *_of(
        "passes/counter",
        (
            "draws of a slice",
            "slices share no pattern",
            "    rows = edit.rows(cut.axis)\n    if cut.pure:\n",
            "    rows = _rows(edit, cut.axis.chunk, None)\n    if cut.pure:\n",
            (f"{_SAME_DRAWS}[dropout]",),
        ),
        (
            "one key",
            "two draws have other numbers",
            'key = _key(edit, 4 * int(node.meta["cp_draw"]) + stream)',
            "key = _key(edit, stream)",
            (f"{_RANDOM}::test_draws_do_not_depend_on_each_other",),
        ),
        (
            "one seed",
            "another step has other numbers",
            "edit.call(aten.bitwise_and.Scalar, edit.seed, _LOW)",
            "edit.call(aten.bitwise_and.Scalar, edit.seed, 0)",
            (f"{_SAME_DRAWS}[dropout]",),
        ),
        (
            "flattened rows in another order",
            "the place of an element in a flattened dim",
            "edit.size(cut.axis.size * cut.inner))",
            "edit.size(cut.inner))",
            (f"{_RANDOM}::test_flattened_rows_do_not_repeat_each_other",),
        ),
        (
            "one stream",
            "the two numbers of a normal draw",
            "uniform(edit, node, shape, layout, wide, 2), 2 * math.pi)",
            "uniform(edit, node, shape, layout, wide), 2 * math.pi)",
            (f"{_RANDOM}::test_normal_numbers_are_normal",),
        ),
    ),
    *_of(
        "passes/custom_function",
        (
            "gradients off by cp",
            "a backward is handed the true gradient",
            "        _scale(backward, placed.outputs, edit.context.cp_size)\n",
            "        pass\n",
            (f"{_FUNCTIONS}::test_exact[clipped]",),
        ),
        (
            "not linear",
            "a function of a whole value has a linear backward",
            "        if not _is_linear(backward, outputs):\n",
            "        if False:\n",
            (f"{_FUNCTIONS}::test_refused",),
        ),
    ),
    *_of(
        "cp_compile/inline",
        (
            "derivative of the forward",
            "a custom function keeps its own gradient",
            '    "autograd_function_apply": _custom_function,\n',
            '    "autograd_function_apply": lambda run, forward, backward, *args, **_: run.inline(forward, args)[0],\n',
            (f"{_FUNCTIONS}::test_exact[clipped]",),
        ),
    ),
    *_of(
        "cp_compile/simulate",
        (
            "tangents of a rank",
            "gradients are averaged over the ranks",
            "mine.copy_(self.cp_size * whole.narrow(dim, r * chunk, rows))",
            "mine.copy_(whole.narrow(dim, r * chunk, rows))",
            ("tests/test_verify.py::test_every_form_of_the_outputs",),
        ),
    ),
    *_of(
        "cp_compile/capture",
        (
            "casts lost",
            "autocast becomes casts",
            "                    return kernel(*args, **kwargs)\n",
            "                    return super().__torch_dispatch__(func, types, args, kwargs)\n",
            ("tests/test_capture.py::test_autocast_becomes_casts",),
        ),
        (
            "parameters written to",
            "a forward that writes to a parameter is refused",
            "                if was_mutated(functional) and value.requires_grad:\n",
            "                if False:\n",
            ("tests/test_refusals.py", "tests/exact/test_parameters.py"),
        ),
    ),
)  # fmt: skip
