from distributed import Client


def executor():
    # Client("tcp://scheduler.example:8786") for workers that run already.
    return Client(n_workers=2, threads_per_worker=1).get_executor()
