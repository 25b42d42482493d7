-- How held-out pairs were judged during training, a row a step and source; sums over pairs.
create table validation (
    run_id varchar not null, attempt bigint not null, step bigint not null, source varchar not null,
    pairs bigint not null, wins bigint not null, ties bigint not null,
    chosen_reward_sum double, rejected_reward_sum double, loss_sum double
);
