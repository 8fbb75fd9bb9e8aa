//! A panic ends the daemon.
//!
//! A thread that panics leaves its work unfinished and its data in an unknown state, and no other thread can detect
//! that. So a panic in any thread of the process ends the daemon, also in a library's thread. One line names the
//! thread and the source line. systemd or Kubernetes starts the daemon again, and the daemon reads its durable state.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;
use std::panic::PanicHookInfo;

/// The exit status of a daemon that a panic has ended.
pub const PANICKED: i32 = 101;

/// Makes a panic in any thread end the process. A daemon's `main` calls this first. A library must not call it: the
/// worker decides how it handles panics.
pub fn end_on_panic(daemon: &'static str) {
    std::panic::set_hook(Box::new(move |panic| {
        let line = describe(daemon, panic);
        let mut out = std::io::stderr().lock();
        let trace = Backtrace::capture();
        // The process must end even if standard error cannot be written.
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
