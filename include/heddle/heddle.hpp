#pragma once

/// Everything that needs no MPI. Prefer the header of the kernel you use: it compiles faster.

#include "heddle/core/cost.hpp"
#include "heddle/core/error.hpp"
#include "heddle/core/matrix_engine.hpp"
#include "heddle/core/parallel.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/mesh/axes.hpp"
#include "heddle/mesh/context_layout.hpp"
#include "heddle/mesh/topology.hpp"
#include "heddle/moe/dims.hpp"
#include "heddle/moe/options.hpp"
#include "heddle/moe/reference.hpp"
#include "heddle/moe/reference_drops.hpp"
#include "heddle/moe/reference_glu.hpp"
#include "heddle/moe/reference_maps.hpp"
#include "heddle/moe/reference_router.hpp"
