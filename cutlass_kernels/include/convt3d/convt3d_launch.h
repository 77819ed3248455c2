/* SPDX-License-Identifier: Apache-2.0
 *
 * convt3d_forward for a caller who has just planned, such as a framework's eager calls, where the host's time counts.
 * The conventions are those of convt3d.h.
 */
#ifndef CONVT3D_CONVT3D_LAUNCH_H_
#define CONVT3D_CONVT3D_LAUNCH_H_

#include "convt3d/convt3d.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As convt3d_forward, where convt3d_make_plan has returned OK for this problem, plan and device, unchanged since, and
 * the device is the current one. None of that is checked again, which halves the host's arithmetic; with anything else
 * the behaviour is undefined. The tensors are checked. */
CONVT3D_API convt3d_status convt3d_launch(const convt3d_problem* problem, const convt3d_plan* plan,
                                          const convt3d_device* device, const convt3d_tensors* tensors, void* stream,
                                          char* message, size_t capacity);

/* The ordinal of the current CUDA device as the driver has it: where convt3d_launch enqueues. A framework may put off
 * the change to another one. -1 where there is none. */
CONVT3D_API int32_t convt3d_current_ordinal(void);

#ifdef __cplusplus
}
#endif

#endif /* CONVT3D_CONVT3D_LAUNCH_H_ */
