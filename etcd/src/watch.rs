//! Watches: the changes of a range of keys, in order.

use crate::client::{Client, Repeat};
use crate::error::Error;
use crate::generated::{self, watch_create_request::FilterType, watch_request};
use crate::kv::{KeyValue, Range, Revision};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Status, Streaming};

/// Interval of progress requests on a quiet watch.
const PROBE: Duration = Duration::from_secs(1);
/// A watch is broken if etcd leaves progress requests without a response for this long.
const SILENCE: Duration = Duration::from_secs(2);

/// One change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A value was put.
    Put(KeyValue),
    /// The key was deleted, at its `modified` revision. There is no value.
    Delete(KeyValue),
}

/// Which changes are watched.
#[derive(Clone, Debug)]
pub struct WatchOptions {
    /// The keys. The limit of the range has no effect here.
    pub keys: Range,
    /// The first revision whose changes the watch reports.
    pub start: Revision,
    /// The watch reports puts only, not deletions.
    pub puts_only: bool,
}

/// An open watch. After an error it has ended: open another watch after the last event's revision.
#[derive(Debug)]
pub struct Watch {
    requests: mpsc::Sender<generated::WatchRequest>,
    answers: Streaming<generated::WatchResponse>,
    events: VecDeque<Event>,
    /// When the last response was taken.
    heard: Instant,
    /// The first and the last progress request since that response.
    asked: Option<(Instant, Instant)>,
}

impl Client {
    /// Opens a watch. If its member of etcd loses the leader, the watch ends with
    /// [`Error::Unavailable`].
    pub async fn watch(&self, options: &WatchOptions) -> Result<Watch, Error> {
        let (key, range_end) = options.keys.bounds();
        let filters = match options.puts_only {
            true => vec![FilterType::Nodelete.into()],
            false => Vec::new(),
        };
        let create = message(watch_request::Request::Create(
            generated::WatchCreateRequest {
                key,
                range_end,
                start_revision: options.start.0,
                filters,
                fragment: true,
            },
        ));
        let (requests, answers, first) = self
            .call(Repeat::Every, |link| {
                let (requests, queue) = mpsc::channel(4);
                // Invariant: the channel is new, so it has room.
                let _queued = requests.try_send(create.clone());
                let mut request = link.request(ReceiverStream::new(queue));
                let required = MetadataValue::from_static("true");
                request.metadata_mut().insert("hasleader", required);
                async move {
                    let mut answers = link.watch().watch(request).await?.into_inner();
                    match answers.message().await? {
                        Some(first) => Ok((requests, answers, first)),
                        None => Err(Status::unavailable(
                            "etcd closed the watch before its first response",
                        )),
                    }
                }
            })
            .await?;
        let mut watch = Watch {
            requests,
            answers,
            events: VecDeque::new(),
            heard: Instant::now(),
            asked: None,
        };
        watch.take(first)?;
        Ok(watch)
    }
}

impl Watch {
    /// The next change. The future may be dropped while it waits; no change is lost then.
    pub async fn next(&mut self) -> Result<Event, Error> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            // The caller may not have waited for a long time. So only a request without a response counts as
            // silence, and a response that has arrived is taken first, also after the deadline.
            let probe = self.asked.map_or(self.heard, |(_, last)| last) + PROBE;
            let broken = self.asked.map(|(first, _)| first + SILENCE);
            let until = broken.map_or(probe, |broken| broken.min(probe));
            match tokio::time::timeout_at(until, self.answers.message()).await {
                Ok(Ok(Some(answer))) => {
                    self.take(answer)?;
                    continue;
                }
                Ok(Ok(None)) => return Err(Error::unavailable("etcd closed the watch")),
                Ok(Err(status)) => return Err(status.into()),
                Err(_) => {}
            }
            let now = Instant::now();
            if broken.is_some_and(|broken| now >= broken) {
                return Err(Error::unavailable(format!(
                    "no response on the watch within {SILENCE:?}"
                )));
            }
            // A full queue already holds a progress request.
            let progress = watch_request::Request::Progress(generated::WatchProgressRequest {});
            let _queued = self.requests.try_send(message(progress));
            let first = self.asked.map_or(now, |(first, _)| first);
            self.asked = Some((first, now));
        }
    }

    fn take(&mut self, answer: generated::WatchResponse) -> Result<(), Error> {
        self.heard = Instant::now();
        self.asked = None;
        if answer.compact_revision > 0 {
            return Err(Error::Compacted);
        }
        if answer.canceled {
            let reason = answer.cancel_reason;
            return Err(if reason.contains("permission denied") {
                Error::PermissionDenied { reason }
            } else {
                Error::unavailable(format!("etcd closed the watch: {reason}"))
            });
        }
        for event in answer.events {
            let is_put = event.r#type() == generated::event::Type::Put;
            let kv = KeyValue::from(event.kv.unwrap_or_default());
            self.events.push_back(if is_put {
                Event::Put(kv)
            } else {
                Event::Delete(kv)
            });
        }
        Ok(())
    }
}

fn message(request: watch_request::Request) -> generated::WatchRequest {
    generated::WatchRequest {
        request: Some(request),
    }
}
