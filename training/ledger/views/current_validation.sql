-- Held-out pairs as current steps judged them: means over pairs, by step and source.
create or replace view current_validation as
select
    run_id, step, source, pairs, wins / pairs as accuracy, ties,
    (chosen_reward_sum - rejected_reward_sum) / pairs as margin, loss_sum / pairs as loss
from validation
semi join current_step using (run_id, attempt, step);
