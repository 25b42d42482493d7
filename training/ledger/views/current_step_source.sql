-- The rows of current steps by source.
create or replace view current_step_source as
select step_source.*
from step_source
semi join current_step using (run_id, attempt, step);
