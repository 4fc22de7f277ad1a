// Records calls of ops that have a gradient, as `_RecordedPlainly` of autograd_functions.py does, without Python until the
// backward, and in the backward too where the gradient is an op. The launch runtime calls `record` for a call that no
// mode and no transform sees.
#define AT_PER_OPERATOR_HEADERS  // else headers include all of ATen's operators, which takes seconds
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/bit_cast.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/utils/object_ptr.h>

namespace jitkern {
using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Run = void (*)(int32_t slot, uint64_t *stack, uint64_t given, uint64_t returned);

// The gradient of an op; never freed. Places are those of `Order` in gradient.py.
struct Gradient {
  std::string name;   // of the op
  std::string kinds;  // of the arguments, as in runtime.c
  std::vector<int64_t> tensors, saved, plain;
  bool fills;                  // whether a gradient that is not there becomes zeros
  PyObject *backward, *check;  // functions of recorder.py
  // The op that is the backward, if one is; its arguments: a letter (g: the gradient of an output, s and p: one of
  // `saved` and `plain`, n: whether a tensor needs a gradient, d: the default) and a place.
  std::optional<c10::OperatorHandle> op;
  std::vector<std::pair<char, int64_t>> taken;
};

thread_local int32_t depth = 0;

struct Inside {
  at::AutoDispatchBelowAutograd below;
  at::AutoGradMode mode{false};
  Inside() { depth++; }
  ~Inside() { depth--; }
};

// The tensor of an argument; null for None.
const at::Tensor *tensor(char kind, uint64_t word) {
  if (kind == 't') return word ? *reinterpret_cast<at::Tensor **>(word) : nullptr;
  return reinterpret_cast<at::Tensor *>(word);
}

// The value of an argument that is no tensor.
c10::IValue value(char kind, uint64_t word) {
  if (std::isupper(kind)) {
    if (!word) return {};
    word = *reinterpret_cast<uint64_t *>(word);
  }
  kind = std::tolower(kind);
  if (kind == 'i') return static_cast<int64_t>(word);
  if (kind == 'b') return (word & 255) != 0;
  if (kind == 'f') return c10::bit_cast<double>(word);
  const char *text = nullptr;
  size_t length = 0;
  auto string = reinterpret_cast<StringHandle>(word);
  TORCH_CHECK(!torch_string_c_str(string, &text) && !torch_string_length(string, &length), "a string without text");
  return std::string(text, length);
}

// What a call keeps beside tensors. Compiled autograd takes it as a text, which it can compare and pass through Python.
struct Kept {
  const Gradient *gradient;
  std::vector<bool> present;  // by tensor input: whether it was not None
  std::vector<c10::IValue> plain;

  std::string text() const {
    std::ostringstream text;
    text << reinterpret_cast<uintptr_t>(gradient);
    for (const bool one : present) text << ' ' << one;
    for (const auto &one : plain) {
      if (one.isInt()) text << " i " << one.toInt();
      if (one.isBool()) text << " b " << one.toBool();
      if (one.isDouble()) text << " f " << c10::bit_cast<int64_t>(one.toDouble());
      if (one.isNone()) text << " n";
      if (!one.isString()) continue;
      text << " s " << one.toStringRef().size();
      for (const char letter : one.toStringRef()) text << ' ' << static_cast<int>(letter);
    }
    return text.str();
  }

  static Kept of(const std::string &text) {
    std::istringstream words(text);
    uintptr_t address;
    words >> address;
    Kept kept{reinterpret_cast<const Gradient *>(address)};
    for (size_t i = 0; i < kept.gradient->tensors.size(); i++) kept.present.push_back(read<bool>(words));
    for (size_t i = 0; i < kept.gradient->plain.size(); i++) {
      const char kind = read<char>(words);
      if (kind == 'i') kept.plain.emplace_back(read<int64_t>(words));
      if (kind == 'b') kept.plain.emplace_back(read<bool>(words));
      if (kind == 'n') kept.plain.emplace_back();
      if (kind == 'f') kept.plain.emplace_back(c10::bit_cast<double>(read<int64_t>(words)));
      if (kind != 's') continue;
      std::string letters(read<size_t>(words), 0);
      for (char &letter : letters) letter = static_cast<char>(read<int>(words));
      kept.plain.emplace_back(std::move(letters));
    }
    return kept;
  }

  template <class T>
  static T read(std::istream &words) {
    T one;
    words >> one;
    return one;
  }
};

PyObject *whole(PyObject *result) {
  if (result) return result;
  python_error error;
  error.persist();
  throw std::move(error);
}

PyObject *python(const c10::IValue &value) {
  if (value.isInt()) return whole(PyLong_FromLongLong(value.toInt()));
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isDouble()) return whole(PyFloat_FromDouble(value.toDouble()));
  if (value.isNone()) return Py_NewRef(Py_None);
  const auto &text = value.toStringRef();
  return whole(PyUnicode_FromStringAndSize(text.data(), text.size()));
}

PyObject *python(const variable_list &tensors) {  // None for one that is not there
  THPObjectPtr tuple(whole(PyTuple_New(tensors.size())));
  for (size_t i = 0; i < tensors.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, whole(THPVariable_Wrap(tensors[i])));
  return tuple.release();
}

PyObject *python(const std::vector<bool> &values) {
  THPObjectPtr tuple(whole(PyTuple_New(values.size())));
  for (size_t i = 0; i < values.size(); i++) PyTuple_SET_ITEM(tuple.get(), i, PyBool_FromLong(values[i]));
  return tuple.release();
}

// Whether Torch takes this gradient, with no more than a conversion of its dtype.
bool fits(const at::Tensor &gradient, const torch::autograd::Edge &edge) {
  if (!edge.is_valid()) return true;
  const auto &wanted = edge.function->input_metadata(edge.input_nr);
  return gradient.sym_sizes() == wanted.shape_as_dim_vector() && gradient.device() == wanted.device() &&
         gradient.is_complex() == c10::isComplexType(wanted.dtype().toScalarType());
}

// A tensor of one element with the shape, dtype and device of the input at this edge.
at::Tensor like(const torch::autograd::Edge &edge) {
  if (!edge.is_valid()) return {};
  const auto &wanted = edge.function->input_metadata(edge.input_nr);
  return at::zeros({}, wanted.options()).expand_symint(wanted.shape_as_dim_vector());
}

// One run of the backward of a call, over what the call has kept. node: null if it is not known.
struct Backward {
  const Kept &kept;
  const variable_list &saved, &grads;
  const Node *node;
  std::vector<bool> needed;  // by tensor input

  // Raise an error that names op and argument if Torch does not take a gradient. found: a tuple, one for each tensor.
  void check(PyObject *found) const {
    variable_list wanted(kept.present.size());
    size_t edge = 0;
    for (size_t i = 0; i < wanted.size(); i++)
      if (kept.present[i] && node) wanted[i] = like(node->next_edge(edge++));
    THPObjectPtr needs(python(needed)), expected(python(wanted));
    THPObjectPtr(whole(PyObject_CallFunctionObjArgs(kept.gradient->check, found, needs.get(), expected.get(), nullptr)));
  }

  // Return a gradient, or null, for each tensor input.
  variable_list by_python() const {
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr args(whole(PyTuple_New(2 + saved.size() + kept.plain.size())));
    PyTuple_SET_ITEM(args.get(), 0, python(grads));
    PyTuple_SET_ITEM(args.get(), 1, python(needed));
    size_t at = 2;
    for (const auto &one : saved) PyTuple_SET_ITEM(args.get(), at++, whole(THPVariable_Wrap(one)));
    for (const auto &one : kept.plain) PyTuple_SET_ITEM(args.get(), at++, python(one));
    THPObjectPtr found(whole(PyObject_CallObject(kept.gradient->backward, args)));
    variable_list results(needed.size());
    bool odd = false;
    for (size_t i = 0; i < results.size(); i++) {
      PyObject *one = PyTuple_GET_ITEM(found.get(), i);
      if (THPVariable_Check(one)) results[i] = THPVariable_Unpack(one);
      odd |= !results[i].defined() && one != Py_None;
    }
    if (odd) check(found);
    return results;
  }

  variable_list by_op() const {
    torch::jit::Stack stack;
    stack.reserve(kept.gradient->taken.size());
    for (const auto &[kind, at] : kept.gradient->taken) {
      if (kind == 'g') stack.emplace_back(grads[at]);
      if (kind == 's') stack.push_back(saved[at].defined() ? c10::IValue(saved[at]) : c10::IValue());
      if (kind == 'p') stack.push_back(kept.plain[at]);
      if (kind == 'n') stack.emplace_back(static_cast<bool>(needed[at]));
      if (kind == 'd') stack.push_back(*kept.gradient->op->schema().arguments()[stack.size()].default_value());
    }
    kept.gradient->op->callBoxed(stack);
    variable_list results(needed.size());
    for (size_t i = 0; i < stack.size(); i++)
      if (stack[i].isTensor()) results[i] = std::move(stack[i]).toTensor();
    return results;
  }

  // Return a gradient, or null, for each tensor input.
  variable_list computed() const {
    if (!kept.gradient->op || at::GradMode::is_enabled()) return by_python();
    try {
      return by_op();
    } catch (const c10::Error &) {  // Python calls the op once more, and raises its error with the type that it has
      return by_python();
    }
  }

  // Return the gradients of the tensors that were not None.
  variable_list run() const {
    const variable_list all = computed();
    variable_list results;
    bool odd = false;
    for (size_t i = 0; i < all.size(); i++) {
      if (!kept.present[i]) continue;
      odd |= node && all[i].defined() && !fits(all[i], node->next_edge(results.size()));
      results.push_back(all[i]);
    }
    if (odd) {
      pybind11::gil_scoped_acquire gil;
      THPObjectPtr found(python(all));
      check(found);
    }
    return results;
  }
};

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {  // for compiled autograd alone
    const Kept kept = Kept::of(ctx->saved_data.at("call").toStringRef());
    return run(kept, ctx->get_saved_variables(), grads, nullptr, [ctx](size_t i) { return ctx->needs_input_grad(i); });
  }

  // Return the gradients of the tensors that were not None, by the edges of the node.
  template <class Needed>
  static variable_list run(const Kept &kept, const variable_list &saved, const variable_list &grads, const Node *node,
                           const Needed &is_needed) {
    Backward backward{kept, saved, grads, node, {}};
    size_t edge = 0;
    for (const bool present : kept.present) backward.needed.push_back(present && is_needed(edge++));
    return backward.run();
  }
};

// A recorded call in the graph of Autograd.
struct Call : torch::autograd::CppNode<Recorded> {
  Kept kept;

  // Torch's own holds the lock of the node while Python runs, where a backward that comes to its own node would wait
  // for itself.
  variable_list apply(variable_list &&grads) override {
    variable_list saved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      saved = ctx_.get_saved_variables();
    }
    at::OptionalDeviceGuard guard;
    for (size_t i = 0; i < grads.size(); i++)
      if (!grads[i].defined() && kept.gradient->fills) grads[i] = output_info_[i].zeros(guard);
    return Recorded::run(kept, saved, grads, this, [this](size_t i) { return task_should_compute_output(i); });
  }

  std::string name() const override { return kept.gradient->name + " backward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
    auto &self = *const_cast<Call *>(this);  // what only compiled autograd reads is written when it first asks
    self.ctx_.saved_data["call"] = kept.text();
    self.is_variable_input_.assign(num_outputs(), true);
    CppNode::compiled_args(args);
  }
};

// How Torch holds a node: as a shared pointer, and since 2.13 as an intrusive one.
template <class Held>
Held held(void (torch::autograd::CppNode<Recorded>::*)(Held));
using Held = std::decay_t<decltype(held(&torch::autograd::CppNode<Recorded>::set_ctx_grad_fn))>;

template <class Made, class Pointer>
Pointer made() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
    return Pointer(new Made, [](auto *one) { deleteNode(one); });
  else
    return c10::make_intrusive<Made>();
}

// Put the results of a call behind its node, and save what the backward needs. known: the arguments, to which the
// results are added.
void attach(const Held &held, const variable_list &inputs, variable_list &known, uint64_t *results, uint64_t returned) {
  auto &node = static_cast<Call &>(*held);
  const auto *gradient = node.kept.gradient;
  node.set_next_edges(torch::autograd::collect_next_edges(inputs));
  node.set_ctx_grad_fn(held);
  for (uint64_t i = 0; i < returned; i++) {
    const auto &result = *reinterpret_cast<at::Tensor *>(results[i]);
    node.output_info_.emplace_back(result);
    if (torch::autograd::isDifferentiableType(result.scalar_type()))
      set_history(result, held);
    else
      node.add_input_metadata(Node::undefined_input());
    known.push_back(result);
  }
  variable_list saved;
  for (auto at : gradient->saved) saved.push_back(known[at]);
  node.ctx_.save_for_backward(std::move(saved));
  node.ctx_.set_materialize_grads(gradient->fills);
  node.save_variables_to_ctx();
}

void record(const Gradient *gradient, uint64_t *stack, uint64_t given, uint64_t returned, Run run, int32_t slot) {
  const Held held = made<Call, Held>();
  auto &node = static_cast<Call &>(*held);
  auto &kept = node.kept;
  kept.gradient = gradient;
  variable_list inputs, known(given);
  for (auto at : gradient->tensors) {
    const at::Tensor *one = tensor(gradient->kinds[at], stack[at]);
    kept.present.push_back(one != nullptr);
    if (one) inputs.push_back(known[at] = *one);
  }
  kept.plain.reserve(gradient->plain.size());
  for (auto at : gradient->plain) kept.plain.push_back(value(gradient->kinds[at], stack[at]));
  {
    Inside inside;
    run(slot, stack, given, returned);  // which frees the arguments: nothing before may raise
    for (uint64_t i = 0; i < returned; i++) {
      auto &result = *reinterpret_cast<at::Tensor *>(stack[i]);
      for (const auto &input : inputs)
        if (result.is_same(input)) result = result.alias();  // an input has a place in the graph already
    }
  }
  try {
    attach(held, inputs, known, stack, returned);
  } catch (...) {  // e.g. of a hook of saved tensors: Torch frees no results of a call that raises
    node.ctx_.save_for_backward({});  // results among these hold the node
    for (uint64_t i = 0; i < returned; i++) delete reinterpret_cast<at::Tensor *>(stack[i]);
    throw;
  }
}
}  // namespace jitkern

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("recording", [] { return jitkern::depth > 0; });
  m.def("gradient", [](std::string name, std::string kinds, std::vector<int64_t> tensors, std::vector<int64_t> saved,
                       std::vector<int64_t> plain, bool fills, pybind11::object backward, pybind11::object check,
                       const std::string &op, std::vector<std::pair<char, int64_t>> taken) {
    std::optional<c10::OperatorHandle> handle;
    if (!op.empty()) handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.c_str(), "");
    return reinterpret_cast<uintptr_t>(new jitkern::Gradient{
        std::move(name), std::move(kinds), std::move(tensors), std::move(saved), std::move(plain), fills,
        backward.release().ptr(), check.release().ptr(), handle, std::move(taken)});
  });
  m.def("functions", [m] {
    return pybind11::make_tuple(reinterpret_cast<uintptr_t>(&jitkern::record), m.attr("recording"), m.attr("gradient"));
  });
}
