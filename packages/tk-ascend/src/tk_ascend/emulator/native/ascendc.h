// AscendC for x86: what TileLang's Ascend 950 code generator calls, as ordinary C++.
//
// TileLang's own templates (tl_templates/ascend) sit unmodified between the generated source and these headers;
// the .cpp files hold everything that does not depend on an element type.
#pragma once

#define __NPU_ARCH__ 3510

// Address spaces and function kinds carry no meaning for g++.
#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __aicore__
#define __global__
#define __vector__
#define __cube__
#define __mix__(...)
#define __simd_vf__
#define __simt_vf__
#define __simd_callee__
#define __simt_callee__
#define __SIMT_DEVICE_FUNCTIONS_DECL__
#define __launch_bounds__(...)
#define __grid_constant__

namespace AscendC {}

#include "types.h"

#include "machine.h"

#include "functions.h"

#include "simd.h"

#include "convert.h"

#include "simt.h"

#include "dma.h"

#include "cube.h"

// debug.h defines its printers once for the scalar core and once for SIMT code.
namespace __asc_aicore {}
using namespace __asc_aicore;
#undef assert
#define assert(condition) ((condition) ? (void)0 : emu::fail("device_assert", "condition does not hold: " #condition))
