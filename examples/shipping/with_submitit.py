import submitit


def executor():
    jobs = submitit.AutoExecutor("logs", cluster="slurm")
    jobs.update_parameters(timeout_min=60, cpus_per_task=4)
    return jobs
