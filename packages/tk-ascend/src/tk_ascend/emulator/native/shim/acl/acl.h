// Stands for the CANN header of this name.
#pragma once
#include "ascendc.h"
