-- Counts are BIGINT, FLOPs and measures DOUBLE, moments TIMESTAMP in UTC (a zone is applied where a query names one).
-- There are no key constraints: DuckDB refuses a key that is deleted and inserted again in one transaction, and the
-- loader decides itself which of two lines stands.

create table run (
    run_id varchar not null, partition varchar, fingerprint varchar not null, plan varchar not null,
    model varchar not null, reference varchar, layout varchar not null, created_at timestamp not null
);

create table run_dataset (run_id varchar not null, dataset varchar not null, path varchar not null);

create table attempt (
    run_id varchar not null, attempt bigint not null, dagster_run_id varchar, from_step bigint not null,
    started_at timestamp not null, ended_at timestamp, outcome varchar, device varchar not null,
    dp_replicate bigint not null, dp_shard bigint not null, cp bigint not null, ulysses bigint not null,
    pack_tokens bigint not null, peak_flops double, gap varchar
);

create table step (
    run_id varchar not null, attempt bigint not null, step bigint not null, epoch bigint not null,
    ended_at timestamp not null,
    window_tokens bigint, physical_tokens bigint, aligned_tokens bigint, source_tokens bigint, logical_tokens bigint,
    loss_tokens bigint, chosen_loss_tokens bigint, rejected_loss_tokens bigint, documents bigint, pairs bigint,
    packs bigint, empty_packs bigint, max_document_tokens bigint, sum_document_tokens_squared bigint,
    flops double, ranks_expected bigint not null, ranks_reported bigint not null, nonfinite bigint not null,
    unknown_reason varchar, loss double, grad_norm double, learning_rate double, wins bigint, ties bigint,
    chosen_reward_sum double, rejected_reward_sum double, data_s double, compute_s double, optimizer_s double,
    save_s double
);

create table step_source (
    run_id varchar not null, attempt bigint not null, step bigint not null, source varchar not null,
    pairs bigint, documents bigint, source_tokens bigint, logical_tokens bigint, loss_tokens bigint,
    chosen_loss_tokens bigint, rejected_loss_tokens bigint, flops double, loss_sum double, wins bigint, ties bigint,
    chosen_reward_sum double, rejected_reward_sum double
);

create table step_pair (
    run_id varchar not null, attempt bigint not null, step bigint not null,
    dataset varchar not null, shard bigint not null, "row" bigint not null, pair_id varchar not null,
    occurrence bigint not null, policy_chosen_logp double, policy_rejected_logp double,
    reference_chosen_logp double, reference_rejected_logp double, loss double
);

create table predicted (
    run_id varchar not null, step bigint not null, epoch bigint not null,
    window_tokens bigint not null, physical_tokens bigint not null, aligned_tokens bigint not null,
    source_tokens bigint not null, logical_tokens bigint not null, loss_tokens bigint not null,
    chosen_loss_tokens bigint not null, rejected_loss_tokens bigint not null, documents bigint not null,
    pairs bigint not null, packs bigint not null, empty_packs bigint not null, max_document_tokens bigint not null,
    sum_document_tokens_squared bigint not null, cost_max_over_mean double not null
);

create table dataset (
    dataset varchar not null, path varchar not null, tokenizer varchar, template varchar, recipe varchar,
    "rows" bigint not null, pairs bigint not null, quarantined bigint not null,
    prompt_tokens bigint not null, chosen_tokens bigint not null, rejected_tokens bigint not null
);

create table source (
    dataset varchar not null, source varchar not null, fingerprint varchar, pairs bigint not null,
    quarantined bigint not null
);

create table shard (
    dataset varchar not null, shard bigint not null, file varchar not null, "rows" bigint not null,
    tokens bigint not null, bytes bigint not null, digest varchar not null
);

create table pair (
    dataset varchar not null, shard bigint not null, "row" bigint not null, pair_id varchar not null,
    source varchar not null, locator varchar not null,
    prompt_tokens bigint not null, chosen_tokens bigint not null, rejected_tokens bigint not null,
    chosen_loss_tokens bigint not null, rejected_loss_tokens bigint not null
);

create table quarantine (
    dataset varchar not null, source varchar not null, locator varchar not null, reason varchar not null,
    detail varchar
);

-- What was read, so that it is not read again: whole files, and of a ledger its complete lines.
create table loaded (
    path varchar not null, bytes bigint not null, digest varchar not null, lines bigint, cut_line bigint
);
