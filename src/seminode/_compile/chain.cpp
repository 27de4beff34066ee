
// Steps one after the other without Python in between. This text ends the source of a program that takes a step.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cmath>
#include <vector>

namespace seminode {

using Entry = void (*)(AtenTensorHandle*, AtenTensorHandle*);
using Handles = std::vector<AtenTensorHandle>;

// Handles that are freed in the end, other than those that were taken.
struct Owned {
    Handles handles;
    Owned() = default;
    explicit Owned(PyObject* capsules) {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(capsules); ++i) {
            handles.push_back(static_cast<AtenTensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(capsules, i), nullptr)));
        }
    }
    Owned(const Owned&) = delete;
    Owned(Owned&& other) noexcept : handles(std::move(other.handles)) { other.handles.clear(); }
    ~Owned() {
        for (AtenTensorHandle handle : handles) {
            if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
        }
    }
    AtenTensorHandle take(size_t i) { return std::exchange(handles[i], nullptr); }
    PyObject* taken() {
        PyObject* list = PyList_New(static_cast<Py_ssize_t>(handles.size()));
        for (size_t i = 0; i < handles.size(); ++i) PyList_SET_ITEM(list, i, PyCapsule_New(take(i), nullptr, nullptr));
        return list;
    }
};

// Programs take over the handles of their inputs.
void append_copy(Handles& inputs, AtenTensorHandle handle) {
    AtenTensorHandle copy;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(handle, &copy));
    inputs.push_back(copy);
}

// A controller's decisions before it has made them, for steps that Python will only take if it decides the same.
//
// The arithmetic is that of `Schedule.plan`, `Schedule.judge` and `Integral.judge`; see there.
struct Forecast {
    double s, carry, sign, place, at_jump, end, resolution, proposal;
    double order, safety, factor_min, factor_max, dt_max;
    double t0 = 0, t1 = 0, dt = 0;
    bool landing = false;

    static double rounding(double a, double b) {
        double x = std::max(std::fabs(a), std::fabs(b));
        return 4.0 * (std::nextafter(x, INFINITY) - x);
    }
    bool plan() {
        if (s >= end) return false;
        double s1 = s + (proposal + carry);
        landing = place < INFINITY && s1 >= place - std::max(rounding(s, place), resolution);
        if (landing && at_jump) return false;
        if (landing) s1 = place;
        t0 = sign * s, t1 = sign * s1, dt = t1 - t0;
        return true;
    }
    // Whether the step is accepted; nothing is known about what follows one that lands, or one with an infinite error.
    bool judge(double ratio, bool& ended) {
        double taken = landing ? std::fabs(dt) : proposal, proposed = proposal;
        ended = landing || !std::isfinite(ratio);
        double shrunk = std::max(factor_min, safety * std::pow(ratio, -1.0 / order));
        if (!(ratio <= 1.0)) {
            proposal = std::min(taken * std::min(shrunk, 1.0), dt_max);
            return false;
        }
        double floor = ratio < 1.0 ? 1.0 : factor_min;
        double grown = std::min(factor_max, std::max(floor, safety * std::pow(ratio, -1.0 / order)));
        proposal = std::min(taken * (ratio == 0.0 ? factor_max : grown), dt_max);
        carry = proposed + carry - std::fabs(dt);
        s = sign * t1;
        return true;
    }
};

// The number in a tensor of one.
template <typename T>
double number(AtenTensorHandle handle) {
    void* data;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
    return *static_cast<T*>(data);
}

// The numbers of a forecast plan are written where the program expects its clock.
template <typename T>
void write(const Forecast& plan, const std::vector<double>& nodes, size_t size, AtenTensorHandle clock) {
    void* data;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(clock, &data));
    T* numbers = static_cast<T*>(data);
    numbers[0] = static_cast<T>(plan.dt);
    for (size_t i = 1; i < size; ++i) {
        double c = i <= nodes.size() ? nodes[i - 1] : 1.0;
        numbers[i] = static_cast<T>(c == 1.0 ? plan.t1 : plan.t0 + c * plan.dt);
    }
}

struct Inputs {
    Entry slope;  // evaluates the field, if the first slope of a step is not known from the one before
    Owned clocks, times, start, shared, rest;
    long end;  // the place of that slope among the outputs of the step before; negative if there is none
    Forecast* forecast;
    std::vector<double> nodes;
    long size;  // of a clock
    bool doubles;
};

// Of each step, what the program returns, and the first slope before that if it was evaluated here. With a forecast,
// `report` gets t0, t1, dt and the error ratio of each.
std::vector<Owned> steps(Inputs& given, std::vector<double>& report) {
    std::vector<Owned> taken;
    Forecast* forecast = given.forecast;
    Handles& start = given.start.handles;
    AtenTensorHandle y = start[0], k = start.size() > 1 ? start[1] : nullptr;
    for (size_t i = 0; i < given.clocks.handles.size(); ++i) {
        if (forecast != nullptr) {
            if (!forecast->plan()) break;
            auto write_clock = given.doubles ? write<double> : write<float>;
            write_clock(*forecast, given.nodes, given.size, given.clocks.handles[i]);
            if (given.slope != nullptr) {
                void* time;
                AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(given.times.handles[i], &time));
                if (given.doubles) *static_cast<double*>(time) = forecast->t0;
                else *static_cast<float*>(time) = static_cast<float>(forecast->t0);
            }
        }
        Owned found;
        if (k == nullptr) {
            Handles inputs{given.times.take(i)};
            append_copy(inputs, y);
            for (AtenTensorHandle handle : given.rest.handles) append_copy(inputs, handle);
            found.handles.resize(1);
            given.slope(inputs.data(), found.handles.data());
            k = found.handles[0];
        }
        Handles inputs{given.clocks.take(i)};
        append_copy(inputs, y);
        append_copy(inputs, k);
        for (AtenTensorHandle handle : given.shared.handles) append_copy(inputs, handle);
        size_t own = found.handles.size();
        found.handles.resize(own + SEMINODE_OUTPUTS);
        inductor_entry_impl(inputs.data(), found.handles.data() + own);
        bool accepted = true, ended = false;
        if (forecast != nullptr) {
            AtenTensorHandle ratio = found.handles[own + 1];
            double size = given.doubles ? number<double>(ratio) : number<float>(ratio);
            report.insert(report.end(), {forecast->t0, forecast->t1, forecast->dt, size});
            accepted = forecast->judge(size, ended);
        }
        if (accepted) {
            y = found.handles[own];
            k = given.end < 0 ? nullptr : found.handles[own + given.end];
        }
        taken.push_back(std::move(found));
        if (ended) break;
    }
    return taken;
}

std::vector<double> numbers_of(PyObject* list) {
    std::vector<double> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) found.push_back(PyFloat_AsDouble(PyList_GET_ITEM(list, i)));
    return found;
}

}  // namespace seminode

// Lists of capsules hold handles: of a clock and, for `slope`, a time per step, of the first state and maybe its slope,
// of what the program takes after those, and of what `slope` takes after time and state. `forecast` and `nodes` are lists
// of numbers; without a forecast, the clocks are filled already. Returns a list for each step, and the report.
extern "C" __attribute__((visibility("default"))) PyObject* seminode_steps(
    void* slope, PyObject* clocks, PyObject* times, PyObject* start, PyObject* shared, PyObject* rest, long end,
    PyObject* forecast, PyObject* nodes, long size, long doubles) {
    using namespace seminode;
    std::vector<double> f = numbers_of(forecast), report;
    Forecast numbers{};
    if (!f.empty()) {
        numbers = {f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12]};
    }
    Inputs given{reinterpret_cast<Entry>(slope), Owned(clocks), Owned(times), Owned(start), Owned(shared), Owned(rest), end,
                 f.empty() ? nullptr : &numbers, numbers_of(nodes), size, doubles != 0};
    try {
        std::vector<Owned> taken = steps(given, report);
        PyObject* list = PyList_New(static_cast<Py_ssize_t>(taken.size()));
        for (size_t i = 0; i < taken.size(); ++i) PyList_SET_ITEM(list, i, taken[i].taken());
        PyObject* found = PyList_New(static_cast<Py_ssize_t>(report.size()));
        for (size_t i = 0; i < report.size(); ++i) PyList_SET_ITEM(found, i, PyFloat_FromDouble(report[i]));
        return Py_BuildValue("(NN)", list, found);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

extern "C" __attribute__((visibility("default"))) void* seminode_entry() {
    return reinterpret_cast<void*>(&inductor_entry_impl);
}
extern "C" __attribute__((visibility("default"))) long seminode_inputs() { return SEMINODE_INPUTS; }
extern "C" __attribute__((visibility("default"))) long seminode_outputs() { return SEMINODE_OUTPUTS; }
