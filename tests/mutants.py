"""Planted bugs: mistakes that trainers really make, one line each, and the test that finds each of them.

    pytest --mutant NAME       runs the suite on a copy of the checkout with that bug in it: it must fail
    python tests/mutants.py    plants all of them, one after the other, and runs for each the test that names the fault

A bug is planted by exact match in a temporary copy, so the list cannot rot silently and the checkout is never touched.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    before: str  # stands exactly once in the file
    after: str
    symptom: str  # what the person at the training run would see
    test: str  # in tests/


LOSS, ALGO, WORLD = "test_loss.py::test_", "test_algorithm.py::test_", "test_enumerated.py::test_"
ROLL, CHAT, MODEL = "test_rollout.py::test_", "test_chat.py::test_", "test_model.py::test_"
PARITY = MODEL + "logits_and_all_gradients_equal_transformers"
PACKED = "test_packed.py::test_"
CACHE = MODEL + "ragged_cached_chunks_equal_one_full_forward"

MUTANTS = {
    # ── Which tokens are trained ──
    "mask_off_by_one": Mutant(
        "grpo.py", "at, targets = position - 1,", "at, targets = position,",
        "each token is predicted from itself: the loss falls to 0, the samples get no better",
        LOSS + "batch_predicts_every_agent_token_from_the_position_before_it_and_nothing_else"),
    "target_not_shifted": Mutant(
        "grpo.py", "targets = position - 1, ids[row, position]", "targets = position - 1, ids[row, position - 1]",
        "the ratio is far from 1 before the first update; the agent learns to repeat what it reads",
        LOSS + "batch_predicts_every_agent_token_from_the_position_before_it_and_nothing_else"),
    "user_tokens_trained": Mutant(
        "grpo.py", "torch.tensor(r.roles) == Role.AGENT", "torch.tensor(r.roles) != Role.TEMPLATE",
        "the agent begins to talk like its user and to invent tool results",
        LOSS + "the_mask_comes_from_roles_never_from_ids"),
    "padding_by_id": Mutant(
        "grpo.py", "torch.tensor(r.roles) == Role.AGENT",
        "(torch.tensor(r.roles) == Role.AGENT) & (torch.tensor(r.ids) != 0)",
        "where the end token is the padding token, its loss is lost: turns get longer until all are cut",
        LOSS + "the_mask_comes_from_roles_never_from_ids"),
    "end_of_a_cut_turn_trained": Mutant(
        "chat.py", "ctx.extend([self.end_id], Role.TEMPLATE)", "ctx.extend([self.end_id], Role.AGENT)",
        "the agent learns to stop where it was cut, in the middle of a word",
        CHAT + "a_cut_turn_gets_an_end_that_is_not_the_agents"),
    "overlong_always_trained": Mutant(
        "grpo.py", '"overlong": cfg.overlong == "train"', '"overlong": True',
        "--overlong mask changes nothing: long answers are unlearned, right or wrong",
        ALGO + "what_each_exit_teaches"),
    # ── Advantages ──
    "advantages_over_the_batch": Mutant(
        "mua_rl.py", "rows = [pair for group in groups for pair in trained_rows(group, cfg)]",
        "rows = trained_rows([t for group in groups for t in group], cfg)",
        "what decides is whether a task was easy: half of the right answers to hard tasks are unlearned",
        ALGO + "advantages_compare_within_a_task_never_over_the_batch"),
    "std_of_a_sample": Mutant(
        "grpo.py", "std = math.sqrt(sum((r - mean) ** 2 for r in known) / n)",
        "std = math.sqrt(sum((r - mean) ** 2 for r in known) / (n - 1))",
        "advantages are smaller than the paper's by √((G − 1)/G): another learning rate in small groups",
        ALGO + "advantages"),
    "equal_rewards_divided_by_rounding": Mutant(
        "grpo.py", "max(known) - min(known) < 1e-6 * max(1.0, *map(abs, known))", "max(known) == min(known)",
        "groups whose rewards are all 0.3 push at random: noise of full size",
        ALGO + "rewards_that_are_equal_but_for_rounding_teach_exactly_nothing"),
    "failed_user_is_reward_0": Mutant(
        "grpo.py", "counted = [t.reward if EXITS[t.exit].counts else None for t in group]",
        "counted = [t.reward or 0.0 for t in group]",
        "a lost connection is punished: reward falls whenever the user's service is down",
        ALGO + "what_each_exit_teaches"),
    "dropped_members_in_the_mean": Mutant(
        "grpo.py",
        "known = [r for r in rewards if r is not None]\n    n =", "known = [r or 0.0 for r in rewards]\n    n =",
        "members without a reward still lower the group's mean: right answers look better than they are",
        WORLD + "a_member_whose_user_failed_changes_nothing_for_the_others"),
    "cut_members_not_in_the_mean": Mutant(
        "grpo.py", "t.reward if EXITS[t.exit].counts else", "t.reward if EXITS[t.exit].trained is True else",
        "groups where most were cut off teach as if those had not happened",
        ALGO + "what_each_exit_teaches"),
    "rloo_baseline_with_oneself": Mutant(
        "grpo.py", '"rloo": (n - 1) / n', '"rloo": 1.0',
        "rloo is dr_grpo: the gradient is short by (G − 1)/G",
        WORLD + "rloo_with_a_constant_mean_is_the_gradient_of_the_expected_reward"),
    "equal_groups_trained": Mutant(
        "grpo.py", "(np.any(a) or not cfg.skip_equal)", "True",
        "groups that teach nothing fill the denominator: the gradient shrinks as the agent gets better",
        LOSS + "the_whole_loss_equals_its_float64_twin_for_every_combination"),
    # ── The loss ──
    "clip_ends_swapped": Mutant(
        "grpo.py",
        "ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)", "ratio.clamp(1 - cfg.clip_high, 1 + cfg.clip_low)",
        "Clip-Higher becomes Clip-Lower: entropy collapses as if it were not there",
        LOSS + "each_end_of_the_clip_stops_the_side_it_is_for"),
    "pessimism_turned_round": Mutant(
        "grpo.py", "torch.minimum(ratio * A, clipped * A)", "torch.maximum(ratio * A, clipped * A)",
        "the clip stops the way back instead of the way out: the policy runs away within a few epochs",
        LOSS + "each_end_of_the_clip_stops_the_side_it_is_for"),
    "ratio_to_itself": Mutant(
        "grpo.py", "old = sampled if batch.old is None else batch.old", "old = logp.detach()",
        "the ratio is always 1, the clip fraction always 0: no trust region in later minibatches",
        LOSS + "each_end_of_the_clip_stops_the_side_it_is_for"),
    "kl_rewarded": Mutant(
        "grpo.py", "loss = loss + cfg.kl * (", "loss = loss - cfg.kl * (",
        "KL grows without bound, and the loss looks better and better",
        LOSS + "kl_estimators_against_the_exact_kl_and_its_gradient"),
    "kl_the_other_way_round": Mutant(
        "grpo.py", "(q - p).exp() - (q - p) - 1", "(p - q).exp() - (p - q) - 1",
        "the logged KL is too large and explodes on rare tokens",
        LOSS + "kl_estimators_against_the_exact_kl_and_its_gradient"),
    "denominator_per_micro_batch": Mutant(
        "grpo.py", "return (weight * loss).sum(), stats", "return loss.mean(), stats",
        "the result depends on --micro-tokens: a lone long episode counts as much as fifty short ones",
        LOSS + "loss_and_gradient_do_not_depend_on_micro_batches_row_order_padding_or_packing"),
    "constant_that_is_none": Mutant(
        "grpo.py",
        "1 / (cfg.tasks * cfg.group_size / cfg.minibatches * cfg.max_len)", "1 / (len(rows) * cfg.max_len)",
        "the denominator depends on what was dropped: the constant mean is biased after all",
        LOSS + "a_constant_mean_does_not_depend_on_what_was_sampled_or_dropped"),
    "sequence_ratio_not_normalised": Mutant(
        "grpo.py", "(total.index_add(0, row, x) / total.index_add(0, row, torch.ones_like(x)))[row]",
        "total.index_add(0, row, x)[row]",
        "GSPO without its root: every long episode is clipped",
        LOSS + "the_whole_loss_equals_its_float64_twin_for_every_combination"),
    "weights_not_truncated": Mutant(
        "grpo.py", "c.clamp(max=cfg.tis)", "c",
        "with a sampler in low precision single tokens decide the step: spikes in the gradient norm",
        LOSS + "truncated_importance_weights_use_the_trainers_own_old_log_probs"),
    # ── The update ──
    "temperature_left_out_by_the_trainer": Mutant(
        "grpo.py",
        "logp, entropy = logprobs(policy, batch, cfg.temperature)", "logp, entropy = logprobs(policy, batch)",
        "the ratio gap is not 0 in the first minibatch, as soon as --temperature is not 1",
        LOSS + "an_update_is_gradient_descent_on_the_loss_written_out"),
    "temperature_left_out_by_the_reference": Mutant(
        "grpo.py", "logprobs(model, b, cfg.temperature)[0]", "logprobs(model, b)[0]",
        "KL is not 0 at the first step, and pulls towards a flatter or sharper policy",
        LOSS + "an_update_is_gradient_descent_on_the_loss_written_out"),
    "one_epoch_only": Mutant(
        "grpo.py", "enumerate(parts * cfg.epochs)", "enumerate(parts)",
        "--epochs changes nothing but the log",
        LOSS + "an_update_is_gradient_descent_on_the_loss_written_out"),
    "gap_of_a_moved_policy": Mutant(
        "grpo.py", "first = first or new", "first = new",
        "the ratio gap shows how far the policy moved, not how well sampler and trainer agree",
        LOSS + "the_gap_between_sampler_and_trainer_is_taken_before_the_first_update"),
    "nan_let_through": Mutant(
        "grpo.py", "if math.isfinite(loss) and math.isfinite(norm):", "if True:",
        "one bad batch, and every weight is NaN",
        LOSS + "an_update_that_is_not_finite_is_skipped_saved_and_ends_the_run_if_it_goes_on"),
    "temperature_in_the_kernels_gradient": Mutant(
        "kernels/logprob.py", "row += [-d_logprob / ctx.temperature,", "row += [-d_logprob,",
        "at temperature T the policy gradient is T times too large, the losses are right",
        "test_logprob.py::test_gradcheck"),
    "weights_do_not_follow_their_masters": Mutant(
        "grpo.py", "p.copy_(master)", "p.copy_(p)",
        "in bf16 the loss never moves, though the gradient norm looks healthy",
        "test_run.py::test_masters_step_as_fp32_weights_would_and_the_weights_follow"),
    "last_micro_batch_only": Mutant(
        "grpo.py", "master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)",
        "master.grad = p.grad.float()",
        "in bf16 a larger batch teaches no more than its last micro-batch",
        "test_run.py::test_masters_step_as_fp32_weights_would_and_the_weights_follow"),
    # ── Rollout, resuming ──
    "random_streams_collide": Mutant(
        "evaluation.py", "PHASE[phase], step, index, member)", "PHASE[phase], step, index + member)",
        "members of neighbouring tasks draw the same numbers: less variety than the batch size promises",
        ALGO + "every_task_member_speaker_step_and_phase_has_its_own_stream"),
    "members_share_a_stream": Mutant(
        "evaluation.py", "PHASE[phase], step, index, member)", "PHASE[phase], step, index, 0)",
        "all members of a group are equal, so is their reward: nothing is ever trained",
        ALGO + "members_of_a_group_differ_and_do_not_depend_on_the_slots"),
    "user_and_agent_share_a_stream": Mutant(
        "evaluation.py", '(*key, SPEAKER["user"])', '(*key, SPEAKER["agent"])',
        "user and agent draw the same numbers: their words are correlated",
        ALGO + "every_task_member_speaker_step_and_phase_has_its_own_stream"),
    "refilled_groups_repeat_streams": Mutant(
        "mua_rl.py", "first=len(tasks))", "first=0)",
        "refilled groups draw the numbers of the groups that they replace",
        ALGO + "groups_that_teach_nothing_are_refilled_up_to_the_cap"),
    "refilled_tasks_come_again": Mutant(
        "mua_rl.py", "1_000_000_000 + i", "1_000_000 + i",
        "refilled tasks are those of another step: the agent meets them twice",
        ALGO + "groups_that_teach_nothing_are_refilled_up_to_the_cap"),
    "stale_keys_after_an_update": Mutant(
        "rollout.py", "self.cached[:] = 0", "self.cached[:] = self.cached",
        "the sampler goes on with keys that older weights made: the ratio gap grows with every step",
        ROLL + "weights_changed_forgets_every_key"),
    "sampler_not_told_of_new_weights": Mutant(
        "mua_rl.py", "sampler.weights_changed()  # the user's too", "pass  # the user's too",
        "with a shared system prompt, keys of older weights are copied to every new episode",
        ALGO + "groups_that_teach_nothing_are_refilled_up_to_the_cap"),
    "keys_of_a_freed_slot_read": Mutant(
        "rollout.py", "keep = len(key) if self.prefixes.get(key) == slot and self.cached[slot] >= len(key) else 0", "keep = len(key)",
        "an episode reads the beginning of the one that had its slot before",
        ROLL + "a_shared_beginning_is_prefilled_once_and_changes_nothing"),
    "padded_row_off_by_its_padding": Mutant(
        "rollout.py", "self.cached[batch] += n\n", "self.cached[batch] += max(n)\n",
        "short messages prefilled beside long ones get positions too high: they turn to gibberish",
        ROLL + "ragged_turns_equal_one_full_forward"),
    "last_column_instead_of_last_token": Mutant(
        "rollout.py", "hidden[rows, [k - 1 for k in n]]", "hidden[rows, -1]",
        "the first token of a turn is drawn from what follows padding",
        ROLL + "rows_of_lengths_fifty_times_apart_and_every_boundary"),
    "a_row_does_not_see_its_newest_token": Mutant(
        "kernels/decode.py", "np.empty(at[t] + 1, np.float32)", "np.empty(max(at[t], 1), np.float32)",
        "the sampler is another model than the trainer: the ratio gap is large from the first step on",
        PACKED + "it_computes_what_the_decoder_computes"),
    "packed_weights_go_stale": Mutant(
        "packed.py", "if self.model.lora is None:", "if False:",
        "the sampler goes on with the weights of the first step: the ratio gap grows with every step",
        PACKED + "weights_that_changed_are_packed_anew"),
    "joining_costs_the_sharing": Mutant(
        "grpo.py", "if fits and after >= before:", "if fits:",
        "training takes as long with the shared prefix as without it, or longer with a larger --micro-tokens",
        "test_prefix.py::test_a_larger_batch_is_never_dearer"),
    "shared_keys_hide_the_own_token": Mutant(
        "model.py", "triu(L - C + 1)", "triu(L - C)",
        "with --share-prefix the ratio gap is large in the first minibatch",
        "test_prefix.py::test_hidden_states_and_gradients_equal_the_unshared_computation"),
    "temperature_not_in_the_log_probs": Mutant(
        "rollout.py", "logp.gather(-1, token).double()", "logits.log_softmax(-1).gather(-1, token).double()",
        "the ratio is not 1 for an unchanged policy, as soon as --temperature is not 1",
        ROLL + "ragged_turns_equal_one_full_forward"),
    "impossible_tokens_drawn": Mutant(
        "rollout.py", "right=True)", "right=False)",
        "once in a long run a token of probability 0 is drawn: its log-prob is −∞",
        ROLL + "inverse_cdf_follows_the_distribution_and_skips_what_is_impossible"),
    "resume_skips_a_step": Mutant(
        "mua_rl.py", "yield self.state.step\n", "yield self.state.step + bool(self.cfg.resume)\n",
        "a resumed run never sees the tasks of one step, and its weights differ from an unbroken one's",
        ALGO + "a_resumed_run_skips_no_step_and_repeats_none"),
    "resume_without_optimizer_state": Mutant(
        "mua_rl.py", "restore_optimizers(job.optimizers, tensors, folder)", "pass",
        "after each resume the loss jumps and recovers: Adam begins anew",
        "test_run.py::test_ctrl_c_finishes_the_step_and_resumes_to_the_same_bits"),
    # ── Conversations, rewards, evaluation ──
    "last_call_of_a_turn_lost": Mutant(
        "rollout.py", "for call in calls if not world.transferred]", "for call in calls[:-1] if not world.transferred]",
        "the reward is graded before the last call: writes that come last are never paid",
        ROLL + "several_calls_are_executed_in_order_and_a_transfer_ends_it"),
    "graded_as_it_was_before": Mutant(
        "tools.py", "difference(goal_rows(self.task, self.tools), self.written, self.task.db)",
        "difference(goal_rows(self.task, self.tools), {}, self.task.db)",
        "the database is graded as it was: only tasks that need no write are ever paid",
        "test_shop.py::test_a_careful_agent_solves_every_task"),
    "database_shared_by_the_group": Mutant(
        "tools.py", "copy.deepcopy(self.task.db[table][key])", "self.task.db[table][key]",
        "what one member writes the others find done: reward rises over the members",
        "test_shop.py::test_worlds_are_private_and_the_shared_base_is_never_written"),
    "failed_user_is_a_zero": Mutant(
        "rollout.py", '"user_failed": Exit("none", False, False)', '"user_failed": Exit("zero", True, True)',
        "the agent is trained on talks that its user broke off",
        ALGO + "what_each_exit_teaches"),
    "user_can_forge_control_tokens": Mutant(
        "chat.py", "(self._shown(text, Role.USER), Role.USER, False)", "(self._shown(text, Role.USER), Role.USER, True)",
        "a user who writes <|im_end|> ends its own turn and speaks as somebody else",
        CHAT + "forged_control_tokens_stay_text"),
    "pass_k_as_a_power": Mutant(
        "evaluation.py", "return math.comb(successes, k) / math.comb(trials, k)", "return (successes / trials) ** k",
        "pass^4 is too high, the more so the fewer trials there are",
        ALGO + "pass_1_and_pass_hat_k_are_unbiased"),
    "failed_users_in_the_score": Mutant(
        "evaluation.py",
        "everyone = [[t.reward for t in g if t.reward is not None] for g in groups]",
        "everyone = [[t.reward or 0.0 for t in g] for g in groups]",
        "success falls when the user's service is down",
        ALGO + "scores_tell_how_much_they_rest_on"),
    # ── The model ──
    "rope_pairs_neighbours": Mutant(
        "model.py", "x.roll(x.shape[-1] // 2, -1)", "x.roll(1, -1)",
        "a loaded checkpoint speaks well for a few words and then repeats itself", PARITY),
    "rope_turns_backwards": Mutant(
        "model.py", "torch.cat([-sin, sin], -1)", "torch.cat([sin, -sin], -1)",
        "a model trained here is right, one loaded from a checkpoint is not", PARITY),
    "norm_after_rope": Mutant(
        "model.py", "q, k = self.q_norm(q), self.k_norm(k)",
        "return self.q_norm(rotate(q, rope)), self.k_norm(rotate(k, rope)), v",
        "Qwen3 checkpoints are slightly worse than they should be, others are right", PARITY),
    "kv_heads_repeated_in_the_wrong_order": Mutant(
        "model.py", "q.view(R, L, self.kv_heads, group, self.head_dim).permute(0, 2, 3, 1, 4)",
        "q.view(R, L, group, self.kv_heads, self.head_dim).permute(0, 3, 2, 1, 4)",
        "the sampler is another model than the trainer: the ratio gap is large from the first step on", CACHE),
    "head_silently_untied": Mutant(
        "model.py", 'self.model["embed_tokens"].weight if self.lm_head is None',
        'self.model["embed_tokens"].weight.detach() if self.lm_head is None',
        "tied weights are trained by their use as an input only; learning is slow for no visible reason", PARITY),
    "attention_sees_the_future": Mutant(
        "model.py", '"is_causal": True', '"is_causal": False',
        "training looks excellent, sampling is no better than before",
        MODEL + "what_comes_later_changes_nothing"),
    "cached_rows_off_by_one": Mutant(
        "model.py", "positions = starts[:, None] + torch.arange(L", "positions = starts[:, None] + 1 + torch.arange(L",
        "every cached token stands one too far: a key of nothing comes first", CACHE),
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[Path]:
    """A copy of the checkout that has this bug, for as long as the context lasts."""
    mutant = MUTANTS[name]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__", "evidence"))
        if (ROOT.parent / "shared").is_dir():  # what some tests look at, beside the checkout
            (copy.parent / "shared").symlink_to((ROOT.parent / "shared").resolve())
        text = (copy / mutant.file).read_text()
        if (n := text.count(mutant.before)) != 1:
            raise ValueError(
                f"{name}: {mutant.before!r} stands {n} times in {mutant.file}, not once; match the list again"
            )
        (copy / mutant.file).write_text(text.replace(mutant.before, mutant.after))
        yield copy


def run_tests(copy: Path, arguments: list[str], name: str = "", **kwargs) -> subprocess.CompletedProcess:
    """pytest in a copy; MUTANT tells the tests which bug it has."""
    env = os.environ | {"MUTANT": name, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=copy, env=env, **kwargs)


def caught(name: str) -> bool:
    """Whether the test that names the fault fails when the bug is there (exit 1; anything else is no failed test)."""
    began = time.monotonic()
    with planted(name) as copy:
        done = run_tests(copy, ["-x", f"tests/{MUTANTS[name].test}"], name, capture_output=True, text=True)
    verdict = {0: "SURVIVED", 1: "caught"}.get(done.returncode, f"BROKEN (pytest exit {done.returncode})")
    print(f"{verdict:10} {name:40} {time.monotonic() - began:5.1f} s  {MUTANTS[name].symptom}", flush=True)
    return done.returncode == 1


def main(names: list[str]) -> int:
    names = names or list(MUTANTS)
    if unknown := set(names) - MUTANTS.keys():
        print(f"no such planted bug: {', '.join(sorted(unknown))}")
        return 2
    tests = list(dict.fromkeys(f"tests/{MUTANTS[name].test}" for name in names))
    if run_tests(ROOT, tests).returncode:
        print("these tests must pass without a bug first")
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = sum(pool.map(caught, names))
    print(f"{found} of {len(names)} planted bugs caught")
    return int(found < len(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
