//! Counts outcomes from the output of test runners.
//!
//! A test that cannot do its work on this machine writes the line `SKIPPED <test>: <reason>` to standard error and
//! returns. The test counts as skipped, not as passed, and its line is shown at the end. A test that is `#[ignore]`d
//! counts as skipped too.
//!
//! A test that failed, was run again and passed counts as passed. Its name is shown at the end, because the test or
//! the tested code has a fault.

use std::collections::BTreeSet;

const SKIPPED: &str = "SKIPPED ";
const UNSTABLE: &str = "UNSTABLE ";

/// The counted outcomes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
    /// The lines of tests that skipped.
    skips: BTreeSet<String>,
    /// Names of tests that passed at the second attempt.
    unstable: BTreeSet<String>,
    /// The steps that failed as a whole.
    broken: Vec<&'static str>,
}

impl Tally {
    /// Counts a step without tests of its own: nothing if it went well, else a failure.
    pub(crate) fn check(&mut self, step: &'static str, went_well: bool) {
        if !went_well {
            self.failed += 1;
            self.broken.push(step);
        }
    }

    /// Counts a check of its own, passed or failed.
    pub(crate) fn checked(&mut self, check: &'static str, holds: bool) {
        self.passed += u64::from(holds);
        self.check(check, holds);
    }

    /// Counts a step that could not be done at all as a failure, and says why.
    pub(crate) fn attempted(&mut self, step: &'static str, done: anyhow::Result<()>) {
        if let Err(error) = &done {
            eprintln!("\n{step}: {error:#}");
        }
        self.check(step, done.is_ok());
    }

    /// Counts a part that cannot run on this machine. The line names it and the reason.
    pub(crate) fn skip(&mut self, what: &str, why: &str) {
        self.skipped += 1;
        self.skips.insert(format!("{SKIPPED}{what}: {why}"));
    }

    /// Counts the tests that skipped for one of these reasons as passed, because all of them ran and passed in
    /// guests. Returns their number.
    pub(crate) fn passed_elsewhere(&mut self, reasons: &[&str]) -> u64 {
        let before = self.skips.len();
        let is_one = |line: &String| reasons.iter().any(|reason| line.contains(reason));
        self.skips.retain(|line| !is_one(line));
        let count = (before - self.skips.len()) as u64;
        self.skipped -= count;
        self.passed += count;
        count
    }

    /// Adds the counts of a runner. `ended_well` is the runner's exit status. A runner that failed without a failed
    /// test counts as broken, and so does a runner without a test.
    pub(crate) fn add(&mut self, step: &'static str, other: Self, ended_well: bool) {
        let ran_nothing = other.passed == 0 && other.skipped == 0;
        let failed_itself = other.failed == 0 && (ran_nothing || !ended_well);
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.skips.extend(other.skips);
        self.unstable.extend(other.unstable);
        self.check(step, !failed_itself);
    }

    /// Adds the failures and skips of checks. Checks that passed are not tests that passed.
    pub(crate) fn add_checks(&mut self, checks: Self) {
        self.failed += checks.failed;
        self.skipped += checks.skipped;
        self.skips.extend(checks.skips);
        self.broken.extend(checks.broken);
    }

    /// Whether something ran and nothing failed.
    pub(crate) const fn is_good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// Prints the skipped tests and the broken steps, and the counts as the last line.
    pub(crate) fn print(&self) {
        println!();
        for line in &self.skips {
            println!("{line}");
        }
        for test in &self.unstable {
            println!("{UNSTABLE}{test}: failed, and passed when it was run again");
        }
        for step in &self.broken {
            println!("FAILED {step}");
        }
        println!(
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        );
    }
}

/// Counts the tests of nextest from its JUnit report. Ignored tests come from its summary, because
/// the report leaves them out.
#[derive(Default)]
pub(crate) struct Nextest {
    ignored: u64,
    tests: u64,
    failed: u64,
    skipped: u64,
    skips: BTreeSet<String>,
    unstable: BTreeSet<String>,
}

impl Nextest {
    /// Reads a line of nextest's output.
    pub(crate) fn read_line(&mut self, line: &str) {
        let line = without_colours(line);
        if let Some(summary) = line.trim_start().strip_prefix("Summary [") {
            self.ignored = count_before(summary, "skipped");
        }
    }

    /// Reads the whole report.
    pub(crate) fn read_report(&mut self, report: &str) {
        for case in report.split("<testcase ").skip(1) {
            self.tests += 1;
            let body = case.split("</testcase>").next().unwrap_or(case);
            if body.contains("<failure") || body.contains("<error") {
                self.failed += 1;
                continue;
            }
            if body.contains("<flakyFailure") || body.contains("<flakyError") {
                let name = case.split('"').nth(1).unwrap_or(case);
                self.unstable.insert(unescape(name));
            }
            // The line may follow the tag that begins the output.
            let lines = body.split(['\n', '>']).filter_map(skip_line);
            let lines: Vec<_> = lines.map(|line| unescape(&line)).collect();
            self.skipped += u64::from(!lines.is_empty());
            self.skips.extend(lines);
        }
    }

    pub(crate) fn tally(self) -> Tally {
        Tally {
            passed: self.tests - self.failed - self.skipped,
            failed: self.failed,
            skipped: self.skipped + self.ignored,
            skips: self.skips,
            unstable: self.unstable,
            ..Tally::default()
        }
    }
}

/// Counts the tests of cargo's own runner. Its output must include the output of passing tests.
#[derive(Default)]
pub(crate) struct Libtest {
    results: Doctests,
    skips: BTreeSet<String>,
}

impl Libtest {
    /// Reads a line of its output.
    pub(crate) fn read(&mut self, line: &str) {
        self.results.read(line);
        self.skips.extend(skip_line(line));
    }

    pub(crate) fn tally(self) -> Tally {
        let mut tally = self.results.tally();
        // The runner counts a skipped test as passed, and each skipped test writes one line.
        let skipped = self.skips.len() as u64;
        tally.passed = tally.passed.saturating_sub(skipped);
        tally.skipped += skipped;
        tally.skips = self.skips;
        tally
    }
}

/// Counts documentation tests, from the last line of each run.
#[derive(Default)]
pub(crate) struct Doctests {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Doctests {
    /// Reads a line of its output.
    pub(crate) fn read(&mut self, line: &str) {
        let line = without_colours(line);
        if let Some(result) = line.strip_prefix("test result: ") {
            self.passed += count_before(result, "passed");
            self.failed += count_before(result, "failed");
            self.ignored += count_before(result, "ignored");
        }
    }

    pub(crate) fn tally(self) -> Tally {
        Tally {
            passed: self.passed,
            failed: self.failed,
            skipped: self.ignored,
            ..Tally::default()
        }
    }
}

/// Counts the tests of pytest, from its verbose output with the reasons of skips.
#[derive(Default)]
pub(crate) struct Pytest {
    results: Doctests,
    skips: BTreeSet<String>,
}

impl Pytest {
    /// Reads a line of its output.
    pub(crate) fn read(&mut self, line: &str) {
        let line = without_colours(line);
        // `SKIPPED [2] path:line: reason`, one line for all that skipped there for that reason.
        if let Some((count, skip)) = line
            .strip_prefix("SKIPPED [")
            .and_then(|rest| rest.split_once("] "))
        {
            self.skips.insert(format!("{SKIPPED}{skip} ({count})"));
        }
        // `==== 3 passed, 1 failed, 2 skipped, 1 error in 0.52s ====`
        if line.starts_with("==") && line.contains(" in ") {
            self.results.passed += count_before(&line, "passed");
            self.results.failed += count_before(&line, "failed");
            self.results.failed += count_before(&line, "error") + count_before(&line, "errors");
            self.results.ignored += count_before(&line, "skipped");
        }
    }

    pub(crate) fn tally(self) -> Tally {
        Tally {
            skips: self.skips,
            ..self.results.tally()
        }
    }
}

fn skip_line(line: &str) -> Option<String> {
    let line = line.trim();
    line.starts_with(SKIPPED).then(|| line.to_owned())
}

/// The number before a word: 3 in `2 passed, 3 skipped` before `skipped`; 0 where the word is not.
fn count_before(text: &str, word: &str) -> u64 {
    let words = text.split(|c: char| !c.is_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let pairs = words.windows(2);
    let mut counts = pairs.filter_map(|pair| match pair {
        [count, name] if *name == word => count.parse().ok(),
        _ => None,
    });
    counts.next().unwrap_or(0)
}

pub(crate) fn without_colours(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain.push_str(before);
        let end = after.find(|c: char| c.is_ascii_alphabetic());
        rest = end.and_then(|at| after.get(at + 1..)).unwrap_or("");
    }
    plain + rest
}

fn unescape(xml: &str) -> String {
    xml.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&apos;", "'")
        .replace("&amp;", "&")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="4" failures="1" errors="0" time="1.5">
    <testsuite name="kvpool-types" tests="4" disabled="0" errors="0" failures="1">
        <testcase name="passes" classname="kvpool-types" time="0.004">
            <system-out>running 1 test
test passes ... ok
</system-out>
            <system-err></system-err>
        </testcase>
        <testcase name="skips" classname="kvpool-types" time="0.004">
            <system-err>SKIPPED skips: no &lt;netns&gt; &amp; no root
more
</system-err>
        </testcase>
        <testcase name="skips_late" classname="kvpool-types" time="0.004">
            <system-err>starting
SKIPPED skips_late: no huge pages
</system-err>
        </testcase>
        <testcase name="passes_late" classname="kvpool-types" time="0.004">
            <flakyFailure timestamp="2026-01-01T00:00:00.000+00:00" time="0.009" type="test failure">
                <system-err>assertion failed</system-err>
            </flakyFailure>
        </testcase>
        <testcase name="fails" classname="kvpool-types" time="0.004">
            <failure type="test failure">SKIPPED fails: and then failed
</failure>
        </testcase>
    </testsuite>
</testsuites>
"#;

    #[test]
    fn nextest_is_counted_from_its_report_and_summary() {
        let mut nextest = Nextest::default();
        nextest.read_line("        PASS [   0.006s] (1/4) 9 skipped");
        nextest.read_line(
            "\u{1b}[31;1m     Summary\u{1b}[0m [   0.301s] 4 tests run: 3 passed (1 slow), 1 failed, 2 skipped",
        );
        nextest.read_report(REPORT);
        let tally = nextest.tally();
        assert_eq!((tally.passed, tally.failed, tally.skipped), (2, 1, 4));
        assert_eq!(tally.unstable, BTreeSet::from(["passes_late".to_owned()]));
        let skips: Vec<_> = tally.skips.iter().map(String::as_str).collect();
        assert_eq!(
            skips,
            [
                "SKIPPED skips: no <netns> & no root",
                "SKIPPED skips_late: no huge pages"
            ]
        );
    }

    #[test]
    fn libtest_is_counted_over_all_its_binaries() {
        let mut libtest = Libtest::default();
        for line in [
            "test a ... ok",
            "SKIPPED a: no root",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished",
            "test result: \u{1b}[31mFAILED\u{1b}[m. 2 passed; 1 failed; 0 ignored; 0 measured",
        ] {
            libtest.read(line);
        }
        let tally = libtest.tally();
        assert_eq!((tally.passed, tally.failed, tally.skipped), (4, 1, 2));
    }

    #[test]
    fn pytest_is_counted_from_its_last_line_and_says_what_it_skipped() {
        let mut pytest = Pytest::default();
        for line in [
            "python/tests/test_pool.py::test_get PASSED                       [ 25%]",
            "SKIPPED [2] python/tests/test_torch.py:9: torch is not installed",
            "=== \u{1b}[31m1 failed\u{1b}[0m, 4 passed, 2 skipped, 1 error in 3.52s ===",
        ] {
            pytest.read(line);
        }
        let tally = pytest.tally();
        assert_eq!((tally.passed, tally.failed, tally.skipped), (4, 2, 2));
        let skips: Vec<_> = tally.skips.iter().map(String::as_str).collect();
        assert_eq!(
            skips,
            ["SKIPPED python/tests/test_torch.py:9: torch is not installed (2)"]
        );
    }

    #[test]
    fn checks_that_passed_do_not_stand_for_tests() {
        let mut checks = Tally::default();
        checks.checked("line width", true);
        checks.checked("cargo deny", false);
        checks.skip("advisories", "no network");
        assert_eq!((checks.passed, checks.failed, checks.skipped), (1, 1, 1));
        let mut tally = Tally::default();
        tally.add_checks(checks);
        assert_eq!((tally.passed, tally.failed, tally.skipped), (0, 1, 1));
        assert_eq!(tally.broken, ["cargo deny"]);
    }

    #[test]
    fn what_passed_elsewhere_is_counted_once() {
        let mut tally = Tally::default();
        for (what, why) in [
            ("a", "no device"),
            ("b", "no root"),
            ("c", "no device at all"),
        ] {
            tally.skip(what, why);
        }
        assert_eq!(tally.passed_elsewhere(&["no device"]), 2);
        assert_eq!((tally.passed, tally.skipped), (2, 1));
        assert_eq!(tally.passed_elsewhere(&["no device"]), 0);
        let left: Vec<_> = tally.skips.iter().map(String::as_str).collect();
        assert_eq!(left, ["SKIPPED b: no root"]);
    }

    #[test]
    fn a_runner_that_fails_without_a_failed_test_is_a_failure() {
        let mut tally = Tally::default();
        tally.add(
            "tests",
            Tally {
                passed: 3,
                ..Tally::default()
            },
            true,
        );
        assert!(tally.is_good());
        tally.add("doctests", Tally::default(), false);
        assert_eq!((tally.failed, tally.is_good()), (1, false));

        let mut tally = Tally {
            passed: 3,
            ..Tally::default()
        };
        let mut skipped = Tally::default();
        skipped.skip("a", "no root");
        tally.add("the Python tests", skipped, true);
        assert!(tally.is_good(), "a runner may skip all of its tests");
        tally.add("the tests", Tally::default(), true);
        assert!(!tally.is_good(), "a runner that counted no test");

        let mut tally = Tally::default();
        let failed = Tally {
            passed: 1,
            failed: 2,
            ..Tally::default()
        };
        tally.add("tests", failed, false);
        assert_eq!(tally.failed, 2);
    }

    #[test]
    fn nothing_run_is_not_good_and_a_failed_check_counts() {
        let mut tally = Tally::default();
        tally.check("format", true);
        assert!(!tally.is_good());
        tally.passed = 1;
        assert!(tally.is_good());
        tally.check("clippy", false);
        assert_eq!((tally.failed, tally.is_good()), (1, false));
        tally.attempted("the Python tests", Ok(()));
        tally.attempted(
            "the Python tests",
            Err(anyhow::anyhow!("nothing to install")),
        );
        assert_eq!((tally.failed, tally.passed), (2, 1));
    }
}
