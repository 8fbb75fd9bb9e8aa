//! Calls that change the pool for other callers write an audit line, even if they are refused.

use super::callers::{Caller, Fixture};
use super::{calls, sessions};
use kvpool_proto as proto;
use kvpool_types::Code;
use parking_lot::Mutex;
use proto::change_replicas_request::Blocks;
use proto::remove_request::What;
use std::io;
use std::sync::{Arc, OnceLock};
use tonic::Status;
use tracing_subscriber::filter::LevelFilter;

/// The log of all masters in this process.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    /// Starts to keep the log of this process, from the first call on.
    pub(crate) fn keep() -> Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        let log = LOG.get_or_init(|| {
            let log = Self::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_max_level(LevelFilter::INFO)
                .with_writer(move || writer.clone())
                .init();
            log
        });
        log.clone()
    }

    /// The number of lines that contain all of `parts`.
    pub(crate) fn lines(&self, parts: &[&str]) -> usize {
        let bytes = self.0.lock().clone();
        let text = String::from_utf8(bytes).unwrap();
        let lines = text.lines();
        lines
            .filter(|line| parts.iter().all(|part| line.contains(part)))
            .count()
    }

    fn audited(&self, subject: &str, operation: &str, what: &str, outcome: &str) -> usize {
        let [subject, operation, what, outcome] = [
            ("subject", subject),
            ("operation", operation),
            ("what", what),
            ("outcome", outcome),
        ]
        .map(|(name, value)| format!("{name}={value:?}"));
        self.lines(&[" audit: ", &subject, &operation, &what, &outcome])
    }
}

fn outcome<T>(answer: Result<T, Status>) -> &'static str {
    answer.map_or_else(|status| calls::code_of(&status).label(), |_| "ok")
}

/// Makes each audited call except the creation of a namespace. The arguments pass the check of
/// rights and nothing more. `mark` distinguishes the calls. Returns the operation, its object, and
/// the outcome.
async fn call_each(
    it: &Fixture,
    token: &str,
    mark: u8,
) -> Vec<(&'static str, String, &'static str)> {
    let name = format!("audited-{mark}");
    let tasks = 100 + usize::from(mark);
    let medium = vec![mark; 16];
    let medium_name = kvpool_types::MediumId::from_slice(&medium).unwrap();
    let mut pool = it.client().await;
    let caller = Some(it.caller(&name));
    let removal = |what| proto::RemoveRequest {
        caller: caller.clone(),
        what: Some(what),
        force: true,
    };
    macro_rules! call {
        ($method:ident, $message:expr) => {
            outcome(pool.$method(it.request($message, token)).await)
        };
    }
    let change = proto::ChangeNamespaceRequest {
        caller: caller.clone(),
        name: name.clone(),
        // A setting that no master knows.
        clear: vec![9999],
        ..Default::default()
    };
    let delete = proto::DeleteNamespaceRequest {
        caller: caller.clone(),
        name: name.clone(),
        ..Default::default()
    };
    let replicas = proto::ChangeReplicasRequest {
        caller: caller.clone(),
        from: name.clone(),
        blocks: Some(Blocks::EveryBlock(false)),
        ..Default::default()
    };
    let drain = proto::DrainNodeRequest {
        caller: caller.clone(),
        name: name.clone(),
        ..Default::default()
    };
    let undrain = proto::UndrainNodeRequest {
        caller: caller.clone(),
        name: name.clone(),
    };
    let cancel = proto::ReplicaTasksRequest {
        caller: caller.clone(),
        cancel: true,
        ids: vec![1; tasks],
    };
    let detach = proto::DetachMediumRequest {
        caller: caller.clone(),
        medium_id: medium.into(),
        ..Default::default()
    };
    let forced = removal(What::Pattern("(".to_owned()));
    let everything = removal(What::Everything(false));
    vec![
        (
            "change_namespace",
            name.clone(),
            call!(change_namespace, change),
        ),
        (
            "delete_namespace",
            name.clone(),
            call!(delete_namespace, delete),
        ),
        (
            "change_replicas",
            name.clone(),
            call!(change_replicas, replicas),
        ),
        ("drain_node", name.clone(), call!(drain_node, drain)),
        ("undrain_node", name.clone(), call!(undrain_node, undrain)),
        (
            "cancel_tasks",
            format!("{tasks} tasks"),
            call!(replica_tasks, cancel),
        ),
        (
            "detach_medium",
            medium_name.to_string(),
            call!(detach_medium, detach),
        ),
        ("remove_forced", name.clone(), call!(remove, forced)),
        ("remove_everything", name, call!(remove, everything)),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn each_audited_call_leaves_one_line_whoever_makes_it() {
    let log = Log::keep();
    let it = Fixture::start().await;
    let mut judged = 0;
    for (mark, caller) in (1..).zip(it.callers()) {
        let Caller {
            name,
            token,
            refused,
            ..
        } = caller;
        let subject = match (refused, name) {
            (Some(_), _) => "unknown",
            (None, name) => name,
        };
        for (operation, what, outcome) in call_each(&it, &token, mark).await {
            let lines = log.audited(subject, operation, &what, outcome);
            assert_eq!(lines, 1, "{operation} of {what} by {name}: {outcome}");
            let all = log.lines(&[
                " audit: ",
                &format!("operation={operation:?}"),
                &format!("what={what:?}"),
            ]);
            assert_eq!(all, 1, "{operation} of {what} by {name}");
            judged += 1;
        }
    }
    println!("{judged} calls");
    it.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_session_of_a_node_leaves_a_line_also_without_a_good_token() {
    let log = Log::keep();
    let it = Fixture::start().await;
    let expired = it.token("node", -60);
    for (token, code) in [
        ("", Code::Unauthenticated),
        (expired.as_str(), Code::TokenExpired),
    ] {
        let before = log.audited("unknown", "session", "", code.label());
        let opened = sessions::open(&it, token, "node-audited").await;
        assert_eq!(opened.err(), Some(code));
        let after = log.audited("unknown", "session", "", code.label());
        assert!(after > before, "{code:?}");
    }
    let session = sessions::open(&it, &it.token("node", 600), "node-audited").await;
    assert!(session.is_ok());
    assert_eq!(log.audited("node", "session", "node-audited", "ok"), 1);
    it.stop().await;
}
