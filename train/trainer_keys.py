"""The keys of a recipe's section `training` that transformers' `TrainingArguments` defines: meanings, limits, and which
of them are refused.

Fields of other versions of transformers that are in neither table are accepted without limits."""

from __future__ import annotations

import multiprocessing
from typing import Any, NamedTuple

from annotated_types import Ge, Gt, Le, Lt

from train.sections import one_of

LOG_LEVELS = ("detail", "debug", "info", "warning", "error", "critical", "passive")
LAST_SEED = 2**32 - 1


class Key(NamedTuple):
    """The meaning of a key, and the limits of its values, as annotations of its type."""

    meaning: str
    limits: tuple[Any, ...] = ()


GROUPS: dict[str, dict[str, Key]] = {
    "Length and batches": {
        "num_train_epochs": Key("Number of passes over the data.", (Gt(0),)),
        "max_steps": Key("Number of optimiser steps, instead of `num_train_epochs`.", (Ge(1),)),
        "per_device_train_batch_size": Key("Number of packed rows in a batch, for each device.", (Ge(1),)),
        "gradient_accumulation_steps": Key("Number of batches in an optimiser step.", (Ge(1),)),
        "auto_find_batch_size": Key("Make the batch smaller if the memory is too small for it."),
    },
    "Optimiser": {
        "learning_rate": Key(
            "Peak learning rate; by default chosen by the backbone's hidden size, for kind mtp a twentieth of that, "
            "with heads.start a quarter.",
            (Gt(0),),
        ),
        "lr_scheduler_type": Key("Schedule of the learning rate. With a time budget, the schedule is always linear."),
        "lr_scheduler_kwargs": Key("Further arguments of the schedule, as a mapping."),
        "warmup_steps": Key("Number of steps in which the learning rate rises; below 1: a share of the run.", (Ge(0),)),
        "optim": Key("Name of the optimiser."),
        "optim_args": Key("Further settings of the optimiser."),
        "optim_target_modules": Key("Layers that an optimiser such as GaLore projects."),
        "weight_decay": Key("Weight decay of AdamW.", (Ge(0),)),
        "adam_beta1": Key("Decay of AdamW's mean of gradients.", (Ge(0), Lt(1))),
        "adam_beta2": Key("Decay of AdamW's mean of squared gradients.", (Ge(0), Lt(1))),
        "adam_epsilon": Key("Number that AdamW adds to its denominator.", (Ge(0),)),
        "max_grad_norm": Key("Norm to which gradients are clipped; 0 or .inf: no clipping.", (Ge(0),)),
    },
    "Precision and memory": {
        "bf16": Key("Compute the heads in bfloat16, with weights in float32; by default on GPUs that have it."),
        "fp16": Key("Compute the heads in float16, with scaled losses."),
        "tf32": Key("Multiply float32 matrices in TF32, on NVIDIA GPUs since Ampere, where it is the default."),
        "activation_checkpointing": Key("Recompute the backbone's activations; only with `adapter`."),
        "activation_checkpointing_kwargs": Key("Further settings of activation checkpointing."),
        "gradient_checkpointing": Key("Older name of `activation_checkpointing`."),
        "gradient_checkpointing_kwargs": Key("Older name of `activation_checkpointing_kwargs`."),
        "torch_compile": Key("Compile the heads and their loss with torch.compile."),
        "torch_compile_backend": Key("Backend of torch.compile."),
        "torch_compile_mode": Key("Mode of torch.compile."),
        "torch_empty_cache_steps": Key("Number of steps after which unused GPU memory is freed.", (Ge(1),)),
        "skip_memory_metrics": Key("Skip the measurement of each phase's memory."),
    },
    "Log": {
        "logging_steps": Key("Number of steps between lines of the log; below 1: a share of the run.", (Gt(0),)),
        "logging_strategy": Key("When to log."),
        "logging_first_step": Key("Also log the first step."),
        "logging_nan_inf_filter": Key("Leave losses that are not finite out of the log's means."),
        "log_on_each_node": Key("With several machines, log on each of them."),
        "log_level": Key("Level of transformers' messages in the first process.", (one_of(*LOG_LEVELS),)),
        "log_level_replica": Key(
            "Level of transformers' messages in all processes except the first.", (one_of(*LOG_LEVELS),)
        ),
        "include_num_input_tokens_seen": Key("Log the number of tokens read: all, non_padding or no."),
        "disable_tqdm": Key("Show no progress bar."),
        "report_to": Key("Programs that also receive the log, such as tensorboard or wandb; they must be installed."),
        "run_name": Key("Name of the run in the programs of `report_to`."),
        "project": Key("Name of the project in trackio."),
        "trackio_space_id": Key("Space on the Hub for trackio."),
        "trackio_bucket_id": Key("Bucket on the Hub for trackio."),
        "trackio_static_space_id": Key("Static Space on the Hub for trackio."),
    },
    "Evaluation": {
        "eval_strategy": Key("When to evaluate; by default every `eval_steps` if there is `eval_data`."),
        "eval_steps": Key("Number of steps between evaluations, by default 500.", (Gt(0),)),
        "eval_delay": Key("Number of steps (with eval_strategy epoch: passes) before the first evaluation.", (Ge(0),)),
        "eval_on_start": Key("Evaluate before the first step."),
        "per_device_eval_batch_size": Key("Number of rows in a batch of an evaluation, for each device.", (Ge(1),)),
        "load_best_model_at_end": Key("Save the heads of the best evaluation, not the last ones."),
        "metric_for_best_model": Key("Metric that ranks evaluations, such as eval_loss or eval_tau."),
        "greater_is_better": Key(
            "Rank evaluations with a greater metric higher; by default false for losses, else true."
        ),
    },
    "Checkpoints": {
        "save_strategy": Key("When to save checkpoints. Rescue checkpoints (`save_minutes`) come in addition."),
        "save_steps": Key("Number of steps between checkpoints; below 1: a share of the run.", (Gt(0),)),
        "save_total_limit": Key("Number of checkpoints to keep; null: all.", (Ge(1),)),
        "save_only_model": Key("Save only the heads in checkpoints, which `--resume` then cannot use."),
        "save_on_each_node": Key("With several machines, save on each of them."),
        "ignore_data_skip": Key(
            "Start a resumed run at the first row of the data, instead of the row after its last step."
        ),
        "restore_callback_states_from_checkpoint": Key(
            "Continue a resumed run with what is left of its time budget and patience."
        ),
    },
    "Seeds and devices": {
        "seed": Key("Seed of the heads' first weights and of the order of the rows.", (Ge(0), Le(LAST_SEED))),
        "data_seed": Key("Seed of the order of the rows alone.", (Ge(0), Le(LAST_SEED))),
        "full_determinism": Key("Use only deterministic operations, which are slower."),
        "use_cpu": Key("Train on the CPU; set by the recipe's key `device`."),
        "debug": Key("Debugging aids of transformers, such as underflow_overflow."),
    },
    "Reading data": {
        "train_sampling_strategy": Key("Order of the rows.", (one_of("random", "sequential", "group_by_length"),)),
        "dataloader_num_workers": Key(
            "Number of processes that read data; by default 2 for features on disk and a GPU, else 0 (none).",
            (Ge(0),),
        ),
        "dataloader_prefetch_factor": Key("Number of batches that each data process reads ahead.", (Ge(1),)),
        "dataloader_persistent_workers": Key(
            "Keep the data processes between passes; the two that are started by default are kept."
        ),
        "dataloader_multiprocessing_context": Key(
            "How data processes are started.", (one_of(*multiprocessing.get_all_start_methods()),)
        ),
        "dataloader_in_order": Key("Return batches in the order in which they were requested."),
        "dataloader_pin_memory": Key("Pin batches in memory, for faster copies to a GPU; by default if there is one."),
        "dataloader_drop_last": Key("Leave out a last batch that is not full."),
    },
    "Several processes": {
        "ddp_backend": Key("Backend of torch.distributed, such as nccl or gloo."),
        "ddp_bucket_cap_mb": Key("Size of the buckets in which gradients are exchanged, in MB.", (Ge(1),)),
        "ddp_broadcast_buffers": Key("Copy the first process's buffers to all processes in every step."),
        "ddp_find_unused_parameters": Key("Look for parameters without a gradient in every step."),
        "ddp_static_graph": Key("Assume that the same parameters are used in every step."),
        "ddp_timeout": Key("Time limit of an exchange, in seconds.", (Ge(1),)),
        "accelerator_config": Key("Further settings of accelerate: a mapping, or a JSON file."),
    },
}
KEYS: dict[str, Key] = {name: key for group in GROUPS.values() for name, key in group.items()}
LIMITS: dict[str, tuple[Any, ...]] = {name: key.limits for name, key in KEYS.items() if key.limits}

_HUB = "publish the finished heads with `medusa export --to hub`"
_COMMAND = "`medusa train` trains; evaluations come from the recipe's key eval_data"
_OWN_LOSS = "choose the loss with training.objective and training.loss_backend"
_OWN_EVALUATION = "evaluations count right guesses and keep no predictions; leave it out"
_OWN_COLUMNS = "the loss reads all columns of the packed rows; leave it out"
_OWN_SHARDING = "processes share the work by DDP; a backbone too large for a GPU is split by shard_backbone: true"

UNUSED: dict[str, str] = {  # names, and what to do instead
    "output_dir": "write output_dir at the top level of the recipe",
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"), _HUB),
    **dict.fromkeys(("hub_always_push", "hub_revision"), _HUB),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _COMMAND),
    "resume_from_checkpoint": "use the option --resume",
    "enable_jit_checkpoint": "every run saves a checkpoint on SIGTERM; leave it out",
    **dict.fromkeys(("label_smoothing_factor", "use_liger_kernel", "liger_kernel_config"), _OWN_LOSS),
    "average_tokens_across_devices": "the loss is always the mean over the labels of all devices; leave it out",
    "neftune_noise_alpha": "the backbone's embeddings are frozen; use training.hidden_noise",
    "use_cache": "training reads whole rows and needs no cache; leave it out",
    **dict.fromkeys(("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object"), _OWN_EVALUATION),
    **dict.fromkeys(("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics"), _OWN_EVALUATION),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "evaluations use the dtype of training; leave it out"),
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), _OWN_COLUMNS),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "parallelism_config"), _OWN_SHARDING),
    "local_rank": "the launcher (torchrun or accelerate) sets it",
}
