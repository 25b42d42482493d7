"""What runs, when and where: definitions, jobs, schedules, sensors and the command line."""
