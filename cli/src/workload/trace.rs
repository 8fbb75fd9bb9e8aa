//! Traces in the public JSONL form, one request a line. An id names a block together with all blocks before
//! it.

use super::{Prompt, Request};
use serde::Deserialize;
use std::collections::HashSet;
use std::io::BufRead;
use std::num::NonZeroUsize;
use std::time::Duration;

/// The tokens of a trace's block.
pub(crate) const BLOCK_TOKENS: NonZeroUsize = NonZeroUsize::new(512).unwrap();

/// Why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file cannot be read.
    #[error("line {line}: cannot be read")]
    Read { line: usize, source: std::io::Error },
    /// A line is not a request.
    #[error(
        "line {line}: not a request; \
         each line is {{\"timestamp\":ms,\"input_length\":n,\"output_length\":n,\"hash_ids\":[..]}}"
    )]
    Malformed {
        line: usize,
        source: serde_json::Error,
    },
    /// A request names one block twice.
    #[error("line {line}: hash id {id} appears twice, but an id names one position in a prompt")]
    Repeated { line: usize, id: u64 },
    /// A request's blocks do not hold its tokens.
    #[error(
        "line {line}: {input} tokens fill {expected} blocks of {BLOCK_TOKENS} tokens, \
         but there are {found} hash ids"
    )]
    Mismatch {
        line: usize,
        input: u64,
        expected: u64,
        found: u64,
    },
    /// Requests are not in order of arrival.
    #[error("line {line}: the timestamp is earlier than that of the previous request")]
    OutOfOrder { line: usize },
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u64,
    #[serde(rename = "output_length")]
    _output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads at most `limit` requests. Empty lines are skipped.
pub(crate) fn parse(reader: impl BufRead, limit: usize) -> Result<Vec<Request>, TraceError> {
    let mut requests: Vec<Request> = Vec::new();
    for (line, text) in (1..).zip(reader.lines()) {
        if requests.len() == limit {
            break;
        }
        let text = text.map_err(|source| TraceError::Read { line, source })?;
        if text.trim().is_empty() {
            continue;
        }
        let request = request(line, &text)?;
        if requests.last().is_some_and(|last| last.at > request.at) {
            return Err(TraceError::OutOfOrder { line });
        }
        requests.push(request);
    }
    Ok(requests)
}

fn request(line: usize, text: &str) -> Result<Request, TraceError> {
    let parsed: Line =
        serde_json::from_str(text).map_err(|source| TraceError::Malformed { line, source })?;
    let expected = parsed.input_length.div_ceil(BLOCK_TOKENS.get() as u64);
    let found = parsed.hash_ids.len() as u64;
    if expected != found {
        return Err(TraceError::Mismatch {
            line,
            input: parsed.input_length,
            expected,
            found,
        });
    }
    let mut seen = HashSet::with_capacity(parsed.hash_ids.len());
    if let Some(id) = parsed.hash_ids.iter().find(|id| !seen.insert(**id)) {
        return Err(TraceError::Repeated { line, id: *id });
    }
    Ok(Request {
        at: Duration::from_millis(parsed.timestamp),
        tokens: parsed.input_length,
        prompt: Prompt::Ids(parsed.hash_ids),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"timestamp": 27, "input_length": 1025, "output_length": 5, "hash_ids": [0, 7, 9]}"#;

    fn error(text: &str) -> String {
        let error = anyhow::Error::new(parse(text.as_bytes(), usize::MAX).unwrap_err());
        format!("{error:#}")
    }

    #[test]
    fn requests_keep_their_order_times_and_blocks() {
        let text = format!("{GOOD}\n\n{}\n", GOOD.replace("27", "28"));
        let requests = parse(text.as_bytes(), usize::MAX).unwrap();
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[0].at, Duration::from_millis(27));
        assert_eq!(requests[0].tokens, 1025);
        assert_eq!(requests[0].prompt, Prompt::Ids(vec![0, 7, 9]));
        assert_eq!(requests[1].at, Duration::from_millis(28));
    }

    #[test]
    fn the_limit_stops_before_what_lies_behind_it() {
        let text = format!("{GOOD}\nnot json");
        assert_eq!(parse(text.as_bytes(), 1).unwrap().len(), 1);
        assert_eq!(parse(text.as_bytes(), 0).unwrap().len(), 0);
    }

    #[test]
    fn bad_lines_are_named() {
        let text = format!("{GOOD}\nnot json");
        let message = error(&text);
        assert!(message.starts_with("line 2: not a request"), "{message}");

        let message = error(r#"{"timestamp": 1, "input_length": 3, "hash_ids": [1]}"#);
        assert!(message.contains("output_length"), "{message}");
    }

    #[test]
    fn a_block_twice_in_a_prompt_is_refused() {
        let message = error(&GOOD.replace("[0, 7, 9]", "[4, 7, 4]"));
        assert!(
            message.starts_with("line 1: hash id 4 appears twice"),
            "{message}"
        );
    }

    #[test]
    fn blocks_must_hold_the_tokens() {
        let message = error(&GOOD.replace("1025", "1024"));
        assert!(
            message.contains("1024 tokens fill 2 blocks of 512 tokens, but there are 3"),
            "{message}"
        );
    }

    #[test]
    fn time_does_not_run_backwards() {
        let text = format!("{GOOD}\n{}", GOOD.replace("27", "26"));
        assert_eq!(
            error(&text),
            "line 2: the timestamp is earlier than that of the previous request"
        );
    }
}
