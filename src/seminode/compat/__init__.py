"""Drop-ins: modules with the names, arguments and results of other libraries, over seminode's solvers and paths."""
