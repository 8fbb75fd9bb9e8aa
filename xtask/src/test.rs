//! `cargo xtask test`.

use crate::cargo::{EVERYTHING, answers, cargo, root, succeeds, watch};
use crate::lint;
use crate::packages::install;
use crate::python;
use crate::rdma;
use crate::tally::{Doctests, Libtest, Nextest, Tally};
use anyhow::Result;
use std::process::Command;

/// The package whose tests start real daemons.
const CLUSTER: &str = "kvpool-tests";
/// Cluster tests at once: each runs several processes, and has deadlines to keep.
const CLUSTER_THREADS: &str = "--test-threads=2";

/// Checks and tests everything, whatever fails first. Returns whether all was well and something ran;
/// a check, a build or a step that cannot be done counts as one failure.
pub(crate) fn run(quick: bool) -> Result<bool> {
    let mut tally = Tally::default();
    tally.check("format", lint::format()?);
    tally.check("clippy", lint::clippy()?);
    if !quick {
        provide_ip()?;
        provide_etcd()?;
        // The cluster tests start these from where this puts them.
        let built = succeeds(cargo(&["build"]).args(EVERYTHING))?;
        tally.check("the build", built);
    }
    if answers(&mut cargo(&["nextest", "--version"])) {
        with_nextest(quick, &mut tally)?;
    } else {
        with_cargo_test(quick, &mut tally)?;
    }
    if !quick {
        let done = python::test(&mut tally);
        tally.attempted("the Python tests", done);
        let done = rdma::test(&mut tally);
        tally.attempted("RDMA in a guest", done);
    }
    let mut doctests = Doctests::default();
    let ended_well = watch(&mut cargo(&["test", "--doc", "--workspace"]), |line| {
        doctests.read(line);
    })?;
    tally.add("the documentation's tests", doctests.tally(), ended_well);
    tally.print();
    Ok(tally.is_good())
}

fn with_nextest(quick: bool, tally: &mut Tally) -> Result<()> {
    let report = root().join("target/nextest/xtask/junit.xml");
    // A report of an earlier run would stand for this one if this one wrote none.
    if let Err(error) = std::fs::remove_file(&report)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        return Err(error.into());
    }
    let mut command = cargo(&["nextest", "run", "--workspace", "--profile", "xtask"]);
    if quick {
        command.args(["--exclude", CLUSTER]);
    }
    let mut nextest = Nextest::default();
    let ended_well = watch(&mut command, |line| nextest.read_line(line))?;
    if let Ok(report) = std::fs::read_to_string(&report) {
        nextest.read_report(&report);
    }
    tally.add("the tests", nextest.tally(), ended_well);
    Ok(())
}

fn with_cargo_test(quick: bool, tally: &mut Tally) -> Result<()> {
    // Passing tests' output is shown: it tells whether a test had to skip.
    let targets = ["--no-fail-fast", "--tests"];
    let shown = ["--", "--show-output"];
    let mut libtest = Libtest::default();
    let mut tests = cargo(&["test", "--workspace", "--exclude", CLUSTER]);
    let mut ended_well = watch(tests.args(targets).args(shown), |line| libtest.read(line))?;
    if !quick {
        let mut tests = cargo(&["test", "-p", CLUSTER]);
        tests.args(targets).args(shown).arg(CLUSTER_THREADS);
        ended_well &= watch(&mut tests, |line| libtest.read(line))?;
    }
    tally.add("the tests", libtest.tally(), ended_well);
    Ok(())
}

/// Installs `ip`, with which some tests cut a network, where that takes no question. Where it cannot
/// be had, those tests say that they skip.
fn provide_ip() -> Result<()> {
    let is_there = answers(Command::new("ip").arg("-V"));
    if !is_there && !install(&["iproute2"])? {
        eprintln!("\n`ip` is not installed (package iproute2): tests that cut a network will skip");
    }
    Ok(())
}

/// Installs etcd, which some tests start processes of, in the same way.
fn provide_etcd() -> Result<()> {
    let is_there =
        std::env::var_os("KVPOOL_ETCD").is_some() || answers(Command::new("etcd").arg("--version"));
    if is_there {
        return Ok(());
    }
    if !install(&["etcd-server"])? {
        eprintln!("\netcd is not installed (package etcd-server): tests over etcd will skip");
    } else if answers(Command::new("systemctl").args(["is-active", "--quiet", "etcd"])) {
        // The package starts a service, which nobody asked for. Tests use ports of their own.
        let mut stop = Command::new("systemctl");
        stop.args(["disable", "--now", "etcd"]);
        if !succeeds(&mut stop)? {
            eprintln!("\nthe etcd service that its package started could not be stopped");
        }
    }
    Ok(())
}
