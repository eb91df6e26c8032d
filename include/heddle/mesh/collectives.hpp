#pragma once

/// Every operation of a Communicator. They are free functions in heddle::mesh, take the ordered axes
/// as an argument, read and write spans, and come in a blocking form and one in two phases (start_...).

#include "heddle/mesh/all_to_all.hpp"
#include "heddle/mesh/barrier.hpp"
#include "heddle/mesh/gather.hpp"
#include "heddle/mesh/permute.hpp"
#include "heddle/mesh/reduction.hpp"
#include "heddle/mesh/replicas.hpp"
#include "heddle/mesh/scan.hpp"
