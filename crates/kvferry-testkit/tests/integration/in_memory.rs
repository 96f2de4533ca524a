//! The suite passes a transport that keeps every promise.

use kvferry_testkit::broken::InMemory;

kvferry_testkit::conformance!(in_memory, InMemory::correct());
