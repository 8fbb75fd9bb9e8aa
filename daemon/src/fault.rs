//! A fault of the daemon's own ends it.
//!
//! A thread that panics has left its work half done, and what it held may be half changed: no other thread
//! can tell. So a panic in any thread of the process, a library's threads included, ends the daemon. One line names
//! the thread and the place. systemd or Kubernetes starts the daemon again, and it reads back what is
//! durable.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::panic::PanicHookInfo;

/// The exit status of a daemon that a panic has ended.
pub const PANICKED: i32 = 101;

/// Has a panic in any thread end the process. Called first in a daemon's `main`, and never by a library: a
/// worker decides for itself what a panic means.
pub fn end_on_panic(daemon: &'static str) {
    std::panic::set_hook(Box::new(move |panic| {
        let line = describe(daemon, panic);
        let mut out = std::io::stderr().lock();
        let trace = Backtrace::capture();
        // A log that nobody reads is no reason to go on.
        if trace.status() == BacktraceStatus::Captured {
            let _unread = writeln!(out, "{trace}");
        }
        let _unread = writeln!(out, "{line}");
        drop(out);
        std::process::exit(PANICKED);
    }));
}

fn describe(daemon: &str, panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or("without a name");
    let payload = panic.payload();
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    let place = panic.location();
    let place = place.map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    format!(
        "{daemon}: ended by a fault of its own: thread {thread} panicked at {place}: {what}; \
         start it again, and report this line"
    )
}
