// Stands in for RTP-LLM's header of this name, which needs kmonitor: TransferBackendFactory.h uses one type of it.
#pragma once

#include <memory>

namespace kmonitor {
class MetricsReporter;
using MetricsReporterPtr = std::shared_ptr<MetricsReporter>;
}  // namespace kmonitor
