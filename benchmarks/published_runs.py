"""x"""
import sys, time, argparse
from pathlib import Path
from published.records import read_records
from published.steps import rehearse_run
from trainfit.hardware import Hardware
import trainfit.hardware as H
