// SPDX-License-Identifier: Apache-2.0
//
// The C interface: null checks and validation, then the C++ function of the same name.
#include "backward/backward.hpp"
#include "convt3d/activation.hpp"
#include "convt3d/convt3d.h"
#include "convt3d/convt3d_backward.h"
#include "convt3d/convt3d_copy.h"
#include "convt3d/convt3d_launch.h"
#include "copy/copy.hpp"
#include "dispatch.hpp"
#include "validate.hpp"

#if !defined(CONVT3D_VERSION_STRING)
#error "the build defines CONVT3D_VERSION_STRING, for example -DCONVT3D_VERSION_STRING=\"1.2.3\""
#endif

using convt3d::Message;

namespace {

convt3d_status require(void const* argument, char const* name, Message& message) {
  if (argument != nullptr) return CONVT3D_OK;
  return message.fail(CONVT3D_INVALID_ARGUMENT, "%s is null", name);
}

convt3d_status require_valid(convt3d_problem const* problem, Message& message) {
  convt3d_status const status = require(problem, "problem", message);
  return status == CONVT3D_OK ? convt3d::validate(*problem, message) : status;
}

}  // namespace

extern "C" {

char const* convt3d_version(void) { return CONVT3D_VERSION_STRING; }

char const* convt3d_kernel_name(int32_t kernel) { return convt3d::kernel_name(kernel); }

char const* convt3d_activation_name(int32_t activation) { return convt3d::activation_name(activation); }

convt3d_status convt3d_output_size(convt3d_problem const* problem, int64_t out_size[3], char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require(problem, "problem", message);
  if (status == CONVT3D_OK) status = require(out_size, "out_size", message);
  return status == CONVT3D_OK ? convt3d::checked_output_size(*problem, out_size, message) : status;
}

convt3d_status convt3d_validate(convt3d_problem const* problem, char* text, size_t capacity) {
  Message message(text, capacity);
  return require_valid(problem, message);
}

convt3d_status convt3d_supported(convt3d_problem const* problem, convt3d_kernel kernel, convt3d_device const* device,
                                 char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require_valid(problem, message);
  if (status == CONVT3D_OK) status = require(device, "device", message);
  if (status != CONVT3D_OK) return status;
  return convt3d::supported(convt3d::compiled_families(), *problem, kernel, *device, message);
}

convt3d_status convt3d_make_plan(convt3d_problem const* problem, convt3d_kernel kernel, convt3d_device const* device,
                                 convt3d_plan* plan, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require_valid(problem, message);
  if (status == CONVT3D_OK) status = require(device, "device", message);
  if (status == CONVT3D_OK) status = require(plan, "plan", message);
  if (status != CONVT3D_OK) return status;
  return convt3d::make_plan(convt3d::compiled_families(), *problem, kernel, *device, plan, message);
}

convt3d_status convt3d_current_device(convt3d_device* device, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status const status = require(device, "device", message);
  return status == CONVT3D_OK ? convt3d::current_device(device, message) : status;
}

int32_t convt3d_current_ordinal(void) { return convt3d::current_ordinal(); }

convt3d_status convt3d_forward(convt3d_problem const* problem, convt3d_plan const* plan, convt3d_tensors const* tensors,
                               void* stream, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require_valid(problem, message);
  if (status == CONVT3D_OK) status = require(plan, "plan", message);
  if (status == CONVT3D_OK) status = require(tensors, "tensors", message);
  if (status != CONVT3D_OK) return status;
  // An empty tensor may have null pointers, and there is nothing to launch.
  if (convt3d::element_count(convt3d::y_shape(*problem)) == 0) return CONVT3D_OK;
  convt3d_device device;
  status = convt3d::current_device(&device, message);
  if (status != CONVT3D_OK) return status;
  return convt3d::forward(convt3d::compiled_families(), *problem, *plan, *tensors, device, stream, message);
}

convt3d_status convt3d_launch(convt3d_problem const* problem, convt3d_plan const* plan, convt3d_device const* device,
                              convt3d_tensors const* tensors, void* stream, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require(problem, "problem", message);
  if (status == CONVT3D_OK) status = require(plan, "plan", message);
  if (status == CONVT3D_OK) status = require(device, "device", message);
  if (status == CONVT3D_OK) status = require(tensors, "tensors", message);
  if (status != CONVT3D_OK) return status;
  if (convt3d::element_count(convt3d::y_shape(*problem)) == 0) return CONVT3D_OK;
  return convt3d::launch(convt3d::compiled_families(), *problem, *plan, *tensors, *device, stream, message);
}

convt3d_status convt3d_backward_activation_workspace(convt3d_activation_gradient const* description,
                                                     size_t* workspace_bytes, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require(description, "description", message);
  if (status == CONVT3D_OK) status = require(workspace_bytes, "workspace_bytes", message);
  if (status == CONVT3D_OK) status = convt3d::backward::validate(*description, message);
  if (status == CONVT3D_OK) *workspace_bytes = convt3d::backward::workspace_bytes(*description);
  return status;
}

convt3d_status convt3d_backward_activation(convt3d_activation_gradient const* description,
                                           convt3d_activation_gradient_tensors const* tensors, void* stream, char* text,
                                           size_t capacity) {
  Message message(text, capacity);
  convt3d_status status = require(description, "description", message);
  if (status == CONVT3D_OK) status = require(tensors, "tensors", message);
  if (status == CONVT3D_OK) status = convt3d::backward::validate(*description, message);
  return status == CONVT3D_OK ? convt3d::backward::run(*description, *tensors, stream, message) : status;
}

convt3d_status convt3d_copy_supported(convt3d_copy const* description, char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status const status = require(description, "description", message);
  convt3d::copy::Rows rows;
  return status == CONVT3D_OK ? convt3d::copy::lay_out(*description, rows, message) : status;
}

convt3d_status convt3d_copy_tensor(convt3d_copy const* description, void const* source, void* target, void* stream,
                                   char* text, size_t capacity) {
  Message message(text, capacity);
  convt3d_status const status = require(description, "description", message);
  return status == CONVT3D_OK ? convt3d::copy::run(*description, source, target, stream, message) : status;
}

}  // extern "C"
