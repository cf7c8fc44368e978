"Processes forked from one that has the course in memory already."
import multiprocessing


def server():
    "What starts such processes; all tests of a worker share it, and what it has imported."
    context = multiprocessing.get_context("forkserver")
    # an optimizer imports torch._dynamo when it is made: two seconds for each child, or once here
    context.set_forkserver_preload(["dp_course.cli.main", "torch._dynamo", "torch.distributed",
                                    "pytest"])
    return context
