-- The rows of current steps by pair.
create or replace view current_step_pair as
select step_pair.*
from step_pair
semi join current_step using (run_id, attempt, step);
